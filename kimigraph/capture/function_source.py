"""``package.module:function`` as a source."""

import copy
import importlib
import sys
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from kimigraph.capture.source import Arguments, Loaded, ModelSource
from kimigraph.ir.config import CompileConfig
from kimigraph.ir.errors import UsageError

_WANTED = "it must return (module, example_inputs) with a tuple of arguments or a dict of keyword arguments"


def function_source(text: str, config: CompileConfig) -> ModelSource:
    """The source that ``package.module:function`` names; the working directory is on the import path meanwhile.

    Raises UsageError when it cannot be imported or does not return a module with its example inputs.
    """
    if config.overrides or config.dtype:
        option = "--set" if config.overrides else "--dtype"
        raise UsageError(f"{option} does not apply to {text}: the function builds the model itself")
    module, args, kwargs = _call(text, _function(text))
    source = module_source(text.rpartition(":")[2], module, args, kwargs, config)
    return replace(source, document={"function": text})


def module_source(
    name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], config: CompileConfig
) -> ModelSource:
    """A module with its example arguments as a source."""
    return ModelSource(
        name=name,
        model_type="function",
        phase=config.phase,
        load=lambda device: Loaded(module, partial(fresh_arguments, args, kwargs)),
    )


def _function(text: str) -> Any:
    module_name, _, name = text.partition(":")
    with _working_directory_importable():
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name is None or not (module_name + ".").startswith(error.name + "."):
                raise
            raise UsageError(
                f"{text}: there is no module {error.name!r} on the import path: install it, or run from its directory"
            ) from error
    if not callable(getattr(module, name, None)):
        raise UsageError(f"{text}: module {module_name} has no function {name!r}; {_WANTED}")
    return getattr(module, name)


@contextmanager
def _working_directory_importable() -> Generator[None]:
    here = str(Path.cwd())
    added = here not in sys.path
    if added:
        sys.path.insert(0, here)
    try:
        yield
    finally:
        if added and here in sys.path:
            sys.path.remove(here)


def _call(text: str, function: Any) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    result = function()
    if not isinstance(result, tuple | list) or len(result) != 2:
        raise UsageError(f"{text} returned a {type(result).__name__}; {_WANTED}")
    module, inputs = result
    if not isinstance(module, nn.Module):
        raise UsageError(f"{text} returned a {type(module).__name__} for the module; {_WANTED}")
    if isinstance(inputs, dict):
        return module, (), inputs
    if isinstance(inputs, tuple | list):
        return module, tuple(inputs), {}
    raise UsageError(f"{text} returned a {type(inputs).__name__} for the example inputs; {_WANTED}")


def fresh_arguments(args: tuple[Any, ...], kwargs: dict[str, Any], length: int | None) -> Arguments:
    """Copies of the example inputs that keep strides, offsets and shared memory; ``length`` is theirs already."""
    detached = pytree.tree_map(lambda x: x.detach() if isinstance(x, Tensor) else x, (args, kwargs))
    return copy.deepcopy(detached)
