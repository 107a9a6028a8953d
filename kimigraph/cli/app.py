"""The application: which commands there are and what they have in common."""

from typing import Annotated

import typer

from kimigraph import __version__
from kimigraph.cli import bench as bench_command
from kimigraph.cli import (
    bisect,
    cache,
    doctor,
    dumps,
    explain,
    export,
    generate,
    measure_device,
    passes,
    quant_report,
    run,
    timeline,
)
from kimigraph.cli import compile as compile_command

HELP = """Compile language models with hybrid sparse attention to Triton programs.

\b
  kimigraph compile examples/k31_tiny --target cpu --verify
  kimigraph run k31_tiny-decode-b2-t1-c256
  kimigraph generate examples/k31_tiny --prompt-ids 1,2,3 --max-new-tokens 8
  kimigraph bench kda --peers
  kimigraph passes list

Exit codes: 0 done, 1 failed, 2 usage, 3 numerics outside tolerance, 4 a required fusion did not fire, 5 corrupt
artifact, 130 interrupted.
"""


def make_app() -> typer.Typer:
    """The ``kimigraph`` application. Its help is plain text, the same on a terminal and in a pipe."""
    app = typer.Typer(
        help=HELP,
        no_args_is_help=True,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_root)
    compile_command.register(app)
    run.register(app)
    generate.register(app)
    bench_command.register(app)
    explain.register(app)
    timeline.register(app)
    bisect.register(app)
    doctor.register(app)
    measure_device.register(app)
    quant_report.register(app)
    app.add_typer(export.make_group(), name="export")
    app.add_typer(passes.make_group(), name="passes")
    app.add_typer(dumps.make_group(), name="dumps")
    app.add_typer(cache.make_group(), name="cache")
    return app


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"kimigraph {__version__}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    del version
