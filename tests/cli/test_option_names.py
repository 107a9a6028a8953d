"""Options have the same names under every version of Typer."""

import inspect
from collections.abc import Iterator
from typing import get_args

import typer
from typer.models import OptionInfo

from kimigraph.cli.app import make_app


def options(app: typer.Typer) -> Iterator[tuple[str, OptionInfo]]:
    """Parameters of all commands that are options, with the name that the function gives them."""
    for command in app.registered_commands:
        assert command.callback is not None
        for name, parameter in inspect.signature(command.callback).parameters.items():
            yield from ((name, found) for found in get_args(parameter.annotation) if isinstance(found, OptionInfo))
    for group in app.registered_groups:
        assert group.typer_instance is not None
        yield from options(group.typer_instance)


def test_a_placeholder_that_spells_the_parameter_does_not_name_the_option() -> None:
    """Of a parameter ``target`` with the placeholder ``TARGET`` and no other name Typer 0.27 makes ``--TARGET``."""
    found = list(options(make_app()))
    assert "target" in {name for name, _ in found} and len(found) > 60
    # In an annotation the first name lies where a default would.
    unnamed = [(name, option) for name, option in found if not option.param_decls and option.default is ...]
    assert len(unnamed) > 20
    assert not [name for name, option in unnamed if (option.metavar or "").lower() == name]
