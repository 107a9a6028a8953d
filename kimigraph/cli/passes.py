"""``kimigraph passes``."""

import inspect
from typing import Annotated

import typer

from kimigraph.cli.console import print_columns, progress
from kimigraph.cli.errors import reports_errors


def make_group() -> typer.Typer:
    """The group with its commands."""
    group = typer.Typer(help="Show the passes of the pipeline.", no_args_is_help=True, rich_markup_mode=None)
    group.command("list")(reports_errors(_list))
    group.command("show")(reports_errors(_show))
    return group


def _list() -> None:
    """List the known passes, those of the default pipeline first and in order."""
    with progress():
        from kimigraph.passes import registered_passes

        known = registered_passes()
    print_columns([(name, pass_class.summary) for name, pass_class in known.items()])


def _show(name: Annotated[str, typer.Argument(metavar="NAME", help="A name from `kimigraph passes list`.")]) -> None:
    """Show what a pass does, its options and where it stands in the default pipeline."""
    with progress():
        from kimigraph.ir.config import CompileConfig
        from kimigraph.passes import default_pipeline
        from kimigraph.passes.options import describe_options
        from kimigraph.passes.registry import default_registry

        pass_class = default_registry().load(name)
        order = default_pipeline(CompileConfig()).names
    place = f"{order.index(name) + 1} of {len(order)}" if name in order else "not in it: name it in --passes"
    options = [f"{option}: {kind} = {default}" for option, kind, default in describe_options(pass_class)]
    print_columns(
        [
            ("name", name),
            ("summary", pass_class.summary),
            ("default pipeline", place),
            ("fusion", "yes" if pass_class.fusion else "no"),
            ("pattern", pass_class.pattern or "not declared"),
            ("constraints", "; ".join(pass_class.constraints) or "none declared"),
            ("effect", pass_class.effect or "not declared"),
            ("options", ", ".join(options) or "none"),
            ("defined in", pass_class.__module__),
        ]
    )
    if pass_class.__doc__:
        typer.echo(f"\n{inspect.cleandoc(pass_class.__doc__)}")
