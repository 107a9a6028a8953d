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


@contextmanager
def reading(what: str) -> Generator[Callable[[int, int], None]]:
    """``progress`` for work that reads much: the value is a function that is told the bytes read and those to read.

    On a terminal a bar with both, the rate and the time left shows while reading goes on.
    """
    with redirect_stdout(sys.stderr):
        if not sys.stderr.isatty():
            yield lambda done, total: None
            return
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
        from rich.progress import TransferSpeedColumn as Rate

        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), Rate(), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True, highlight=False), transient=True) as bar:
            task = bar.add_task(what, total=None, visible=False)
            yield lambda done, total: bar.update(task, completed=done, total=total, visible=done < total)


class ShapeProgress:
    """Shows how many of several shapes are compiled, and what each is at."""

    def __init__(self, bar: Any, total: int) -> None:
        self._bar, self._tasks = bar, dict[int, Any]()
        self._all = bar.add_task("compiling", total=total) if bar is not None and total > 1 else None

    def say(self, shape: int, message: str) -> None:
        """A shape has come to another stage."""
        if self._bar is not None:
            if shape not in self._tasks:
                self._tasks[shape] = self._bar.add_task("", total=None)
            name = f"shape {shape + 1}: " if self._all is not None else ""
            self._bar.update(self._tasks[shape], description=f"{name}{message}")

    def done(self, shape: int) -> None:
        """A shape is finished."""
        if self._bar is not None and shape in self._tasks:
            self._bar.remove_task(self._tasks.pop(shape))
        if self._bar is not None and self._all is not None:
            self._bar.advance(self._all)


@contextmanager
def shape_progress(total: int) -> Generator[ShapeProgress]:
    """``progress`` for ``total`` shapes: on a terminal a line for each that is compiling, and a bar where there are
    several."""
    with redirect_stdout(sys.stderr):
        if not sys.stderr.isatty():
            yield ShapeProgress(None, total)
            return
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn

        several = (BarColumn(), MofNCompleteColumn()) if total > 1 else ()
        columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), *several)
        console = Console(stderr=True, highlight=False, markup=False)
        with Progress(*columns, console=console, transient=True) as bar:
            yield ShapeProgress(bar, total)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
