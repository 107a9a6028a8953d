"""Kernel templates: real Python modules whose text, with ``CONSTANTS`` filled in, becomes a file of an artifact."""
