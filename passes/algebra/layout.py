"""Where the elements of a view lie in the tensor below it.

A chain of views is replayed on a meta tensor; shape, strides and offset of the result say everything about it, so one
comparison takes the place of every spelling of view, transpose, unsqueeze, select, slice, split and expand.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import Node

from kimigraph.passes.algebra.nodes import COPIES, FLOATS, dtype, is_cast, is_split_item, is_view, shape, widens

ATEN = torch.ops.aten


@dataclass(frozen=True)
class Layout:
    """Sizes, strides (0 where the size is 1: such a stride means nothing) and offset, in elements of the base."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0

    @classmethod
    def of(cls, tensor: Tensor) -> "Layout":
        """The layout of a tensor."""
        strides = tuple(0 if size == 1 else stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        return cls(tuple(tensor.shape), strides, int(tensor.storage_offset()))


@dataclass(frozen=True)
class Broadcast:
    """A step of a chain that is no node: an elementwise operation stretches its operand to ``shape``."""

    shape: tuple[int, ...]


Step = Node | Broadcast


def contiguous(sizes: Sequence[int]) -> Layout:
    """The row-major layout of that shape."""
    return Layout.of(torch.empty(tuple(sizes), device="meta"))


def peel(node: Node, casts: str = "widening") -> tuple[Node, list[Node]]:
    """The node below views, splits and copies, and the chain of nodes from there outwards.

    ``casts`` says which type changes are walked through: "none", "widening" (those that keep every value) or "float"
    (also roundings between float types of 16 bits and more: what 8 bits keep is another number).
    """
    chain: list[Node] = []
    while True:
        if is_split_item(node):
            source = node.args[0]
            assert isinstance(source, Node)
            inner = source.args[0]
        elif is_view(node) or node.target in COPIES or (is_cast(node) and _walked(node, casts)):
            inner = node.args[0]
        else:
            return node, chain[::-1]
        if not isinstance(inner, Node):
            return node, chain[::-1]
        chain.append(node)
        node = inner


def _walked(node: Node, casts: str) -> bool:
    if casts == "none" or not isinstance(node.args[0], Node):
        return False
    if widens(node):
        return True
    return casts == "float" and {dtype(node.args[0]), dtype(node)} <= {*FLOATS, torch.float64}


def replay(chain: Sequence[Step], tensor: Tensor) -> Tensor:
    """Apply the views of the chain to ``tensor``; copies and casts keep the element map.

    Raises RuntimeError when a view of that tensor cannot be expressed without a copy.
    """
    for node in chain:
        if isinstance(node, Broadcast):
            tensor = tensor.broadcast_to(node.shape)
        elif is_split_item(node):
            source = node.args[0]
            assert isinstance(source, Node)
            split: Callable[..., Any] = cast("Callable[..., Any]", source.target)
            parts = split(tensor, *source.args[1:], **source.kwargs)
            tensor = parts[node.args[1]]
        elif is_view(node):
            tensor = _apply(node, tensor)
    return tensor


def _apply(node: Node, tensor: Tensor) -> Tensor:
    if any(isinstance(argument, Node) for argument in node.args[1:]):
        raise RuntimeError("a view with a computed size")
    copying = node.target in (ATEN.reshape.default, ATEN._unsafe_view.default)
    target: Callable[..., Tensor] = ATEN.view.default if copying else cast("Callable[..., Tensor]", node.target)
    return target(tensor, *node.args[1:], **node.kwargs)


def base_tensor(node: Node) -> Tensor:
    """A row-major meta tensor of the node's shape: the base on which chains are replayed."""
    return torch.empty(shape(node), device="meta", dtype=torch.uint8)


def layout(base: Node, chain: Sequence[Step]) -> Layout | None:
    """The layout of the chain's result over its base; None when a copy makes it inexpressible."""
    try:
        return Layout.of(replay(chain, base_tensor(base)))
    except (RuntimeError, IndexError, TypeError):
        return None
