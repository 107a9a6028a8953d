"""``python -m kimigraph`` is ``kimigraph``."""

from kimigraph.cli import main

main()
