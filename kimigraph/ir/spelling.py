"""Nodes and their arguments as Python source, exact enough to run again."""

import operator
from collections.abc import Callable, Iterable
from functools import cache
from keyword import iskeyword
from typing import Any, cast

import torch
from torch._ops import OpOverload
from torch.fx import Node

from kimigraph.ir.errors import CompileError
from kimigraph.ir.purity import region_module

NameOf = Callable[[Node], str]


def format_call(node: Node, name_of: NameOf) -> str:
    """The expression that computes a call_function, call_method or call_module node.

    ``name_of`` gives the variable of an argument node. Operators are spelled in full (``torch.ops.aten.mm.default(x,
    w)``), an item of a tuple as ``x[0]``, a region as a call of ``region_function(node)``. Raises CompileError naming
    the node for a target or an argument that has no spelling.
    """
    try:
        return _call(node, name_of)
    except _NoSpelling as error:
        raise CompileError(f"node {node.name}: {error}") from error


def format_argument(value: Any, name_of: NameOf) -> str:
    """An argument as source: nodes by name, constants as literals that evaluate to the same bits.

    Raises CompileError for a value that has no literal, such as a symbolic size.
    """
    try:
        return _argument(value, name_of)
    except _NoSpelling as error:
        raise CompileError(str(error)) from error


def region_function(node: Node) -> str:
    """The name of the function that stands for the region that a call_module node runs."""
    return "run_" + str(node.target).replace(".", "_")


def variable_names(nodes: Iterable[Node], reserved: frozenset[str]) -> dict[Node, str]:
    """A variable for each node: its own name, with underscores added where that is a keyword or ``reserved``."""
    names: dict[Node, str] = {}
    taken: set[str] = set()
    for node in nodes:
        name = node.name if node.name.isidentifier() else f"_{''.join(c if c.isalnum() else '_' for c in node.name)}"
        while iskeyword(name) or name in reserved or name in taken:
            name += "_"
        taken.add(name)
        names[node] = name
    return names


class _NoSpelling(Exception):
    """A value that cannot be written as source; the text says which."""


def _call(node: Node, name_of: NameOf) -> str:
    if node.target is operator.getitem and isinstance(node.args[1], int):
        return f"{_argument(node.args[0], name_of)}[{node.args[1]}]"
    arguments = [_argument(value, name_of) for value in node.args]
    arguments += [_keyword(key, _argument(value, name_of)) for key, value in node.kwargs.items()]
    if node.op == "call_method":
        return f"{arguments[0]}.{node.target}({', '.join(arguments[1:])})"
    if node.op == "call_module":
        if region_module(node) is None:
            raise _NoSpelling(f"it calls the module {node.target}; only regions (graph modules) can be called")
        return f"{region_function(node)}({', '.join(arguments)})"
    if node.op == "call_function":
        return f"{_target(node.target)}({', '.join(arguments)})"
    raise _NoSpelling(f"a {node.op} is not a call")


@cache
def _target(target: Any) -> str:
    if isinstance(target, OpOverload):
        text = "torch.ops"
        for part in str(target).split("."):
            text = f'getattr({text}, "{part}")' if iskeyword(part) or not part.isidentifier() else f"{text}.{part}"
        return text
    module, name = getattr(target, "__module__", ""), getattr(target, "__name__", "")
    if module in ("_operator", "operator", "math") or (module == "torch" and hasattr(torch, name)):
        return f"{module.lstrip('_')}.{name}"
    raise _NoSpelling(
        f"it calls {target}, which has no spelling; only operators of torch.ops and Python's own have one"
    )


def _keyword(key: str, value: str) -> str:
    return f'**{{"{key}": {value}}}' if iskeyword(key) else f"{key}={value}"


def _argument(value: Any, name_of: NameOf) -> str:
    if isinstance(value, Node):
        return name_of(value)
    if value is None or value is Ellipsis or isinstance(value, bool | str):
        return "..." if value is Ellipsis else repr(value)
    if isinstance(value, int):
        return int.__repr__(value)
    if isinstance(value, float):
        finite = value - value == 0
        return float.__repr__(value) if finite else f'float("{float.__repr__(value)}")'
    if isinstance(value, complex):
        return f"complex({_argument(value.real, name_of)}, {_argument(value.imag, name_of)})"
    if isinstance(value, torch.dtype | torch.memory_format | torch.layout):
        return str(value)
    if isinstance(value, torch.device):
        return f'torch.device("{value}")'
    return _container(value, name_of)


def _container(value: Any, name_of: NameOf) -> str:
    if isinstance(value, slice):
        parts = cast("tuple[Any, Any, Any]", (value.start, value.stop, value.step))
        return f"slice({', '.join(_argument(part, name_of) for part in parts)})"
    if isinstance(value, list | tuple):
        items = [_argument(item, name_of) for item in cast("list[Any]", value)]
        if isinstance(value, list):
            return f"[{', '.join(items)}]"
        return f"({items[0]},)" if len(items) == 1 else f"({', '.join(items)})"
    if isinstance(value, dict):
        pairs = cast("dict[Any, Any]", value).items()
        return f"{{{', '.join(f'{_argument(k, name_of)}: {_argument(v, name_of)}' for k, v in pairs)}}}"
    hint = "; capture with static shapes" if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool) else ""
    raise _NoSpelling(f"an argument of type {type(value).__name__} ({value}) has no literal{hint}")
