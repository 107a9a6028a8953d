"""Names and structure of what a model takes and returns."""

import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.utils import _pytree as pytree

_FLAT_PREFIXES = ("cache.", "state.")


@dataclass(frozen=True)
class Leaf:
    """One leaf of a call: its outside name and value."""

    name: str
    value: Any


def normalize_call(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The call with keyword arguments in the order of the signature."""
    order = list(inspect.signature(module.forward).parameters)
    position = {name: place for place, name in enumerate(order)}
    return args, dict(sorted(kwargs.items(), key=lambda item: position.get(item[0], len(order))))


def positional_parameters(module: nn.Module) -> list[str]:
    """The names of the parameters that may be given by position, in order."""
    parameters = inspect.signature(module.forward).parameters.values()
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]


def call_leaves(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Leaf]:
    """The leaves of a call in the order of ``tree_flatten((args, kwargs))``, named by parameter and path.

    Keys of a flat cache dict (``cache.3.latent``) are names as they are.
    """
    names = positional_parameters(module)
    leaves: list[Leaf] = []
    for path, value in pytree.tree_flatten_with_path((args, kwargs))[0]:
        which, first, *rest = (_key(entry) for entry in path)
        if which == 0:
            first = names[first] if first < len(names) else f"args.{first}"
        leaves.append(Leaf(_join([first, *rest]), value))
    return leaves


def result_leaves(spec: pytree.TreeSpec) -> list[str]:
    """The names of a result's leaves: ``output`` for a lone tensor, else ``output.`` and the path."""
    placeholders = pytree.tree_unflatten(list(range(spec.num_leaves)), spec)
    paths = pytree.tree_flatten_with_path(placeholders)[0]
    return [_join(["output", *(_key(entry) for entry in path)]) for path, _ in paths]


def unique(names: Iterable[str]) -> list[str]:
    """The names with ``.2``, ``.3`` appended where one comes again."""
    seen: dict[str, int] = {}
    result: list[str] = []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        result.append(name if seen[name] == 1 else f"{name}.{seen[name]}")
    return result


def _key(entry: Any) -> Any:
    for attribute in ("key", "idx", "name"):
        if hasattr(entry, attribute):
            return getattr(entry, attribute)
    return str(entry)


def _join(parts: list[Any]) -> str:
    last = str(parts[-1])
    return last if last.startswith(_FLAT_PREFIXES) else ".".join(str(part) for part in parts)
