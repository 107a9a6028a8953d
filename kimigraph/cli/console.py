"""Where text goes: results to stdout, progress to stderr on a terminal; plain text elsewhere."""

import json
import math
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager, redirect_stdout
from typing import Any

import typer

PLAIN_WIDTH = 1000
"""Columns of a console that is no terminal: wide enough that no path is broken in two."""


def result_console() -> Any:
    """A rich console on stdout; without a terminal it writes plain text and wraps nothing."""
    from rich.console import Console

    return Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else PLAIN_WIDTH)


def print_json(document: Any) -> None:
    """Print one JSON document. JSON has no NaN and no infinities: they are null."""
    typer.echo(json.dumps(_finite(document), indent=2, allow_nan=False))


def print_columns(rows: list[tuple[str, ...]], indent: int = 0) -> None:
    """Print rows in aligned columns; the last column wraps on a terminal."""
    from rich.padding import Padding
    from rich.table import Table

    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for row in rows:
        table.add_row(*row)
    result_console().print(Padding(table, (0, 0, 0, indent)))


@contextmanager
def progress() -> Generator[Callable[[str], None]]:
    """Run a block of long work; the value is a function that says what is going on.

    Messages show on stderr when that is a terminal. What libraries print meanwhile goes to stderr, so that stdout holds
    the result alone.
    """
    with redirect_stdout(sys.stderr):
        if not sys.stderr.isatty():
            yield lambda message: None
            return
        from rich.console import Console

        with Console(stderr=True, highlight=False, markup=False).status("starting") as status:
            yield lambda message: status.update(message)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
