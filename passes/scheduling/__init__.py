"""Streams: where a program can fork, which branch goes where, in which order it is recorded, and what is checked."""
