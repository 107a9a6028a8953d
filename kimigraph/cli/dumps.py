"""``kimigraph dumps``."""

from pathlib import Path
from typing import Annotated

import typer

from kimigraph.cli.console import print_columns, progress
from kimigraph.cli.errors import reports_errors

Directory = Annotated[Path, typer.Argument(metavar="DIR", help="Directory that --dump-passes wrote.")]
Number = Annotated[int, typer.Argument(metavar="N", min=0, help="Number of a dump; 0 is the captured graph.")]


def make_group() -> typer.Typer:
    """The group with its commands."""
    group = typer.Typer(help="Read the dumps of --dump-passes.", no_args_is_help=True, rich_markup_mode=None)
    group.command("list")(reports_errors(_list))
    group.command("show")(reports_errors(_show))
    group.command("diff")(reports_errors(_diff))
    return group


def _list(directory: Directory) -> None:
    """List the dumps in the order of the passes."""
    with progress():
        from kimigraph.tools.dumps import list_dumps

        entries = list_dumps(directory)
    rows = [("n", "after", "changed", "nodes", "seconds", "file")]
    for entry in entries:
        changed = "failed" if entry.failed else "yes" if entry.modified else "no" if entry.index else ""
        nodes = "" if entry.nodes is None else str(entry.nodes)
        seconds = "" if entry.seconds is None else f"{entry.seconds:.3f}"
        rows.append((str(entry.index), entry.name, changed, nodes, seconds, entry.file))
    print_columns(rows)


def _show(directory: Directory, number: Number) -> None:
    """Print a dump: a script that runs."""
    with progress():
        from kimigraph.tools.dumps import show_dump

        text = show_dump(directory, number)
    typer.echo(text, nl=False)


def _diff(
    directory: Directory,
    number: Number,
    other: Annotated[
        int | None, typer.Argument(metavar="M", min=0, help="Number of another dump.", show_default=False)
    ] = None,
) -> None:
    """Print what pass N changed, or the difference between two dumps, as a unified diff."""
    with progress():
        from kimigraph.tools.dumps import diff_dumps

        text = diff_dumps(directory, number, other)
    typer.echo(text, nl=False)
