"""The parts of ``canonicalize``: each a function over a graph that returns what it changed."""
