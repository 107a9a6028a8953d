"""``kimigraph bisect`` and ``kimigraph reduce``: which rewrite is wrong, and the least that shows it."""

from pathlib import Path

import typer

from kimigraph.cli.console import print_columns, print_json, progress
from kimigraph.cli.errors import reports_errors
from kimigraph.cli.options import with_compile_options
from kimigraph.ir.config import CompileConfig


def register(app: typer.Typer) -> None:
    """Add the commands to ``app``."""
    app.command("bisect")(reports_errors(with_compile_options(_bisect)))
    app.command("reduce")(reports_errors(with_compile_options(_reduce)))


def _bisect(source: str, config: CompileConfig, out: Path | None, as_json: bool) -> None:
    """Find the pass, and the rewrite inside it, that changes results or crashes; takes the options of compile.

    Writes one Python file that shows the failure: it exits with 1 while the failure shows and with 0 when not.

    \b
      kimigraph bisect examples/k31_tiny --passes canonicalize,my-pass --out wrong.py
    """
    _report(source, config, out, as_json, shrink=False)


def _reduce(source: str, config: CompileConfig, out: Path | None, as_json: bool) -> None:
    """Shrink the graph while a pass still fails on it; takes the options of compile.

    Writes one Python file that shows the failure: it exits with 1 while the failure shows and with 0 when not.

    \b
      kimigraph reduce examples/k31_tiny --passes canonicalize,my-pass --out small.py
    """
    _report(source, config, out, as_json, shrink=True)


def _report(source: str, config: CompileConfig, out: Path | None, as_json: bool, shrink: bool) -> None:
    with progress() as notify:
        from kimigraph.tools.investigate import investigate

        document = investigate(source, config, out, shrink, notify)
    if as_json:
        print_json(document)
    elif document["pass"] is None:
        typer.echo(f"{document['source']}: every pass of '{document['pipeline']}' keeps the result")
    else:
        typer.echo(f"{document['source']}: pass {document['index']} '{document['pass']}' is at fault")
        rows = [(key, str(document[key])) for key in ("rewrite", "failure", "nodes", "reproducer")]
        print_columns(rows, indent=2)
