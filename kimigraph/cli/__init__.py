"""The command line: one file per group of commands. Nothing here imports torch before a command needs it."""

import sys


def main() -> None:
    """Run ``kimigraph`` with the arguments of this process."""
    try:
        from kimigraph.cli.app import make_app

        make_app()(prog_name="kimigraph")
    except KeyboardInterrupt:  # while starting up; a running command reports its own
        sys.exit(130)
