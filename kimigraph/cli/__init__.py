"""The command line: one file per group of commands. Nothing here imports torch before a command needs it."""

import io
import sys


def main() -> None:
    """Run ``kimigraph`` with the arguments of this process."""
    try:
        from kimigraph.cli.app import make_app

        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):  # a path may hold what the terminal cannot show
                stream.reconfigure(errors="backslashreplace")
        make_app()(prog_name="kimigraph")
    except KeyboardInterrupt:  # while starting up; a running command reports its own
        sys.exit(130)
