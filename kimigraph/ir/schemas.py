"""What an operator's schema says about one call of it: arguments by name, writes, aliases, randomness."""

import operator
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import Node

_HIDDEN_ALIASES = frozenset(
    f"aten::{name}" for name in ("_unsafe_view", "dropout", "type_as", "atleast_1d", "atleast_2d", "atleast_3d")
)
"""Operators that may return their first argument's storage although their schema does not say so."""

# fmt: off
_WRITING_FUNCTIONS: frozenset[Any] = frozenset([
    operator.setitem, operator.delitem, operator.iadd, operator.iand, operator.iconcat, operator.ifloordiv,
    operator.ilshift, operator.imatmul, operator.imod, operator.imul, operator.ior, operator.ipow, operator.irshift,
    operator.isub, operator.itruediv, operator.ixor,
])
_VIEW_METHODS = frozenset([
    "T", "alias", "as_strided", "chunk", "contiguous", "detach", "diagonal", "expand", "expand_as", "flatten", "mT",
    "movedim", "narrow", "permute", "reshape", "reshape_as", "select", "slice", "split", "squeeze", "swapaxes", "t",
    "to", "transpose", "type_as", "unbind", "unflatten", "unfold", "unsqueeze", "view", "view_as",
])
# fmt: on
_EFFECT_NAMES = ("_functional_assert_async", "_functional_assert_scalar", "_functional_sym_constrain_range")
_COMMUNICATING = ("exchange_picks", "rank_gather", "rank_sum")
_COLLECTIVES = ("_c10d_functional", "_c10d_functional_autograd", "c10d", "_dtensor")


def argument(node: Node, name: str) -> Any:
    """The value of the call's argument ``name``, the schema's default when it is not given.

    ``node`` must call an operator with a schema that has such an argument; KeyError otherwise.
    """
    target = node.target
    declared = _declared(target).get(name) if isinstance(target, OpOverload) else None
    if declared is None:
        raise KeyError(f"node {node.name}: {target} has no argument {name!r}")
    position, default = declared
    args = node.args
    return args[position] if position < len(args) else node.kwargs.get(name, default)


def bind(node: Node) -> dict[str, Any]:
    """All arguments of the call by name, in schema order, defaults filled in; KeyError without a schema."""
    if not isinstance(node.target, OpOverload):
        raise KeyError(f"node {node.name}: {node.target} has no schema")
    return {name: argument(node, name) for name in _declared(node.target)}


@cache
def _declared(target: OpOverload) -> dict[str, tuple[int, Any]]:
    """Position and default of each argument."""
    return {
        declared.name: (position, declared.default_value if declared.has_default_value() else None)
        for position, declared in enumerate(target._schema.arguments)
    }


@cache
def written_arguments(target: OpOverload) -> tuple[str, ...]:
    """Names of the arguments whose storage the operator writes."""
    return tuple(a.name for a in target._schema.arguments if a.alias_info is not None and a.alias_info.is_write)


@cache
def aliased_argument(target: OpOverload, result: int) -> str | None:
    """Name of the argument whose storage result number ``result`` may share, or None for a fresh result."""
    schema = target._schema
    if target.name() in _HIDDEN_ALIASES:
        return schema.arguments[0].name
    if not schema.returns:
        return None
    # Views that return a list (split, unbind) declare one return, and all its items alias one argument.
    returned = schema.returns[result if result < len(schema.returns) else 0]
    for declared in schema.arguments:
        if declared.alias_info is None:
            continue
        if "*" in declared.alias_info.after_set and str(returned.type) == "List[Tensor]":
            return declared.name
        if returned.alias_info is not None and returned.alias_info.before_set & declared.alias_info.before_set:
            return declared.name
    return None


def returns_list(target: OpOverload) -> bool:
    """Whether a call gives several tensors, which ``getitem`` takes apart without making a view."""
    returns = target._schema.returns
    return len(returns) != 1 or str(returns[0].type).startswith("List")


def is_pure_call(node: Node, target: OpOverload) -> bool:
    """Whether the call only computes: no write, no assertion, no communication, no randomness that takes effect."""
    return bool(target._schema.returns) and not written_arguments(target) and not has_effect(node, target)


def has_effect(node: Node, target: OpOverload) -> bool:
    """Whether the call does something besides its result and its writes: communication, randomness, an assertion."""
    name = target.name().partition("::")[2].partition(".")[0]
    if target.namespace in _COLLECTIVES or name in (*_EFFECT_NAMES, *_COMMUNICATING):
        return True
    # Tags of newer releases are looked up by name.
    hidden = getattr(torch.Tag, "maybe_aliasing_or_mutating", None)
    if torch.Tag.nondeterministic_seeded in target.tags or hidden in target.tags:
        return not _drops_nothing(node, target)
    return False


def _drops_nothing(node: Node, target: OpOverload) -> bool:
    """Whether a call tagged as random has its randomness switched off: probability 0, or not in training."""
    names = {declared.name for declared in target._schema.arguments}
    if "dropout_p" in names:
        return argument(node, "dropout_p") == 0
    if "dropout" in target.name() and {"p", "train"} <= names:
        return argument(node, "p") == 0 or argument(node, "train") is False
    return False


def writes_first_argument(target: Any) -> bool:
    """Whether a Python function such as ``operator.iadd`` or ``operator.setitem`` writes its first argument."""
    return target in _WRITING_FUNCTIONS


def is_plain_function(target: Any) -> bool:
    """Whether a target without a schema is known to only compute: Python operators and arithmetic on symbols."""
    if target in _WRITING_FUNCTIONS or target is print:
        return False
    module = getattr(target, "__module__", "")
    if module in ("_operator", "operator", "math", "builtins"):
        return True
    return module == "torch" and str(getattr(target, "__name__", "")).startswith(("sym_", "_sym_"))


def method_writes_self(method: str) -> bool:
    """Whether the tensor method writes its tensor: by torch's convention its name ends with an underscore."""
    return method in ("__setitem__", "__iadd__", "__imul__") or (method.endswith("_") and not method.endswith("__"))


def method_shares_storage(method: str) -> bool:
    """Whether the tensor method may return a view of its tensor, or the tensor itself."""
    return method_writes_self(method) or method in _VIEW_METHODS


def nodes_in(value: Any) -> Iterator[Node]:
    """The nodes in an argument, which may be a node, a list of nodes, or neither."""
    if isinstance(value, Node):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from nodes_in(item)
