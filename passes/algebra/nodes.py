"""Small questions about nodes: shape, type, constants, argument lookup."""

from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import Node

from kimigraph.passes.algebra.refusal import Refused

ATEN = torch.ops.aten
MASKED = -1e30
"""Scores and additive masks at or below this value hide a key: -inf and the least finite numbers of all float types."""

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
COPIES = frozenset((ATEN.clone.default, ATEN.contiguous.default, ATEN.dropout.default))
CASTS = frozenset((ATEN._to_copy.default, ATEN.to.dtype, ATEN.to.dtype_layout))


def shape(node: Node) -> tuple[int, ...]:
    """The static shape of a node's tensor. Refused when a size is symbolic or the node is no tensor."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or any(isinstance(size, torch.SymInt) for size in value.shape):
        raise Refused("it has no static shape", node)
    return tuple(value.shape)


def dtype(node: Node) -> torch.dtype | None:
    """The element type of a node's tensor, None when it is no tensor."""
    value = node.meta.get("val")
    return value.dtype if isinstance(value, torch.Tensor) else None


def rank(node: Node) -> int:
    """Number of dims of a node's tensor."""
    return len(shape(node))


def packet(node: Any) -> str:
    """The operator's name without overload (``mul``), the Python function's name, or an empty text."""
    if not isinstance(node, Node) or node.op != "call_function":
        return ""
    if isinstance(node.target, OpOverload):
        return node.target.overloadpacket.__name__
    return getattr(node.target, "__name__", "")


def described(node: Any) -> str:
    """A node's operation for a message: ``aten.sigmoid``, or ``placeholder``."""
    if not isinstance(node, Node):
        return repr(node)
    if isinstance(node.target, OpOverload):
        return str(node.target.overloadpacket)
    return packet(node) or node.op


def argument(node: Node, name: str, default: Any = None) -> Any:
    """An operator call's argument by its name in the schema, or its schema default, or ``default``."""
    if name in node.kwargs:
        return node.kwargs[name]
    if isinstance(node.target, OpOverload):
        for position, declared in enumerate(node.target._schema.arguments):
            if declared.name == name:
                if position < len(node.args) and not declared.kwarg_only:
                    return node.args[position]
                return declared.default_value if declared.has_default_value() else default
    return default


def is_number(value: Any) -> bool:
    """Whether it is a Python int or float (a bool is not)."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def constant(value: Any) -> float | int | bool | None:
    """The one value of all elements: of a number, a filled tensor, or a view or copy of one; None if not known."""
    while isinstance(value, Node):
        name = packet(value)
        if name in ("zeros", "new_zeros", "zeros_like"):
            return 0
        if name in ("ones", "new_ones", "ones_like"):
            return 1
        if name in ("full", "new_full", "full_like"):
            return constant(argument(value, "fill_value"))
        if name == "scalar_tensor":
            return constant(argument(value, "s"))
        if not is_view(value) and value.target not in COPIES and value.target not in CASTS:
            return None
        value = value.args[0]
    return value if isinstance(value, int | float) else None


VIEWS = frozenset(
    getattr(getattr(ATEN, name), overload)
    for name, overload in (
        ("view", "default"),
        ("reshape", "default"),
        ("_unsafe_view", "default"),
        ("unsqueeze", "default"),
        ("squeeze", "default"),
        ("squeeze", "dim"),
        ("squeeze", "dims"),
        ("expand", "default"),
        ("transpose", "int"),
        ("permute", "default"),
        ("t", "default"),
        ("mT", "default"),
        ("alias", "default"),
        ("detach", "default"),
        ("select", "int"),
        ("slice", "Tensor"),
        ("flatten", "using_ints"),
        ("unflatten", "int"),
        ("movedim", "int"),
        ("narrow", "default"),
    )
)
SPLITS = frozenset(
    (
        ATEN.split_with_sizes.default,
        ATEN.split.Tensor,
        ATEN.split.sizes,
        ATEN.chunk.default,
        ATEN.unbind.int,
    )
)


def is_view(node: Node) -> bool:
    """Whether the node is a view of its first argument (an item of a split is seen at its ``getitem``)."""
    return node.op == "call_function" and node.target in VIEWS


def is_split_item(node: Node) -> bool:
    """Whether the node is one part of a split, chunk or unbind."""
    source = node.args[0] if node.op == "call_function" and packet(node) == "getitem" else None
    return isinstance(source, Node) and source.target in SPLITS


def is_cast(node: Node) -> bool:
    """Whether the node changes the element type and nothing else."""
    return node.op == "call_function" and node.target in CASTS


def widens(node: Node) -> bool:
    """Whether a cast keeps every value: to the same type, float to wider float, int to wider int."""
    source, target = dtype(node.args[0]) if isinstance(node.args[0], Node) else None, dtype(node)
    if source is None or target is None:
        return False
    if source == target:
        return True
    if source.is_floating_point != target.is_floating_point or torch.bool in (source, target):
        return False
    if source.is_floating_point and not {source, target} <= {*FLOATS, torch.float64}:
        return False  # torch has no promotion from 8-bit floats
    return torch.promote_types(source, target) == target
