"""Where text goes: results to stdout, progress to stderr on a terminal; plain text elsewhere."""

import json
import math
import shutil
import sys
import textwrap
from collections.abc import Callable, Generator
from contextlib import contextmanager, redirect_stdout
from itertools import zip_longest
from typing import Any

import typer

MIN_WRAP = 20
"""Columns that the last cell of a row gets at least, on however narrow a terminal."""


def print_json(document: Any) -> None:
    """Print one JSON document. JSON has no NaN and no infinities: they are null."""
    typer.echo(json.dumps(_finite(document), indent=2, allow_nan=False))


def print_columns(rows: list[tuple[str, ...]], indent: int = 0, err: bool = False) -> None:
    """Print rows in aligned columns. The last column wraps on a terminal; elsewhere a row is a line."""
    widths = [max(map(len, column)) for column in zip_longest(*rows, fillvalue="")]
    terminal = (sys.stderr if err else sys.stdout).isatty()
    columns = shutil.get_terminal_size().columns if terminal else sys.maxsize
    for row in rows:
        start = " " * indent + "".join(f"{cell:<{width}}  " for cell, width in zip(row[:-1], widths, strict=False))
        room = max(columns - len(start), MIN_WRAP)
        lines = textwrap.wrap(row[-1], room, break_long_words=False, break_on_hyphens=False) or [""]
        typer.echo("\n".join([start + lines[0], *(" " * len(start) + line for line in lines[1:])]).rstrip(), err=err)


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
