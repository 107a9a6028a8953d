"""Commands that take the options of ``kimigraph compile``."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from kimigraph.cli import compile as compile_command
from kimigraph.ir.errors import UsageError

Out = Annotated[
    Path | None, typer.Option("--out", metavar="FILE", help="The reproducer. [default: ./<source>-<pass>-<command>.py]")
]


def with_compile_options(command: Callable[..., None]) -> Callable[..., None]:
    """``command(source, config, out, as_json)`` with the options of ``kimigraph compile``.

    Those that say what to do with the program are taken too and change nothing, so that a line can be pasted.
    """
    parameters = [item.replace(annotation=Out) if item.name == "out" else item for item in compile_command.parameters()]

    def wrapped(**options: Any) -> None:
        configs = compile_command.configurations(options)
        if len(configs) > 1:
            raise UsageError(f"{len(configs)} shapes were asked for: give one shape at a time")
        command(options["source"], configs[0], options["out"], options["as_json"])

    wrapped.__doc__, wrapped.__name__ = command.__doc__, command.__name__
    wrapped.__annotations__ = {item.name: item.annotation for item in parameters}
    wrapped.__dict__["__signature__"] = inspect.Signature(parameters)
    return wrapped
