"""The axes under which a subgraph is read, and how a tensor in it varies along each of them.

A frame names the dims of a result, for example ("b", "s", "t"). Going down from the result to its operands, views,
broadcasting, reductions and matrix products change how the operand's dims meet those axes; a reduction adds an axis. So
every leaf ends up with one stride per axis over its own elements, whatever the order of dims in between.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor
from torch.fx import Node

from kimigraph.passes.algebra.layout import base_tensor, contiguous, replay
from kimigraph.passes.algebra.nodes import COPIES, dtype, is_cast, shape
from kimigraph.passes.algebra.refusal import Refused

EXPRESSION_ERRORS = (RuntimeError, IndexError, TypeError)


@dataclass(frozen=True)
class Frame:
    """``view`` takes a tensor of the node's shape to one whose dims are ``axes``; it may broadcast, never copy."""

    axes: tuple[str, ...]
    view: Callable[[Tensor], Tensor]

    @classmethod
    def of(cls, axes: str) -> "Frame":
        """The frame of a tensor whose dims are these one-letter axes, in order."""
        return cls(tuple(axes), lambda tensor: tensor)

    def below(self, chain: Sequence[Node]) -> "Frame":
        """The frame of the node under a chain of views."""
        return Frame(self.axes, lambda tensor: self.view(replay(chain, tensor))) if chain else self

    def operand(self, result: Sequence[int]) -> "Frame":
        """The frame of an operand of an elementwise operation with that result shape."""
        return Frame(self.axes, lambda tensor: self.view(tensor.broadcast_to(tuple(result))))

    def reduced(self, dim: int, keepdim: bool, axis: str) -> "Frame":
        """The frame of what a sum or mean over ``dim`` reduces; the reduced dim becomes ``axis``."""

        def view(tensor: Tensor) -> Tensor:
            result = tensor.narrow(dim, 0, 1) if keepdim else tensor.select(dim, 0)
            return _with_axis(self.view(result), tensor.shape[dim], tensor.stride(dim))

        return Frame((*self.axes, axis), view)

    def left(self, result: Sequence[int], axis: str) -> "Frame":
        """The frame of the left factor of a matrix product; the contracted dim becomes ``axis``."""

        def view(tensor: Tensor) -> Tensor:
            inner = tensor.select(-1, 0).unsqueeze(-1).broadcast_to(tuple(result))
            return _with_axis(self.view(inner), tensor.shape[-1], tensor.stride(-1))

        return Frame((*self.axes, axis), view)

    def right(self, result: Sequence[int], axis: str) -> "Frame":
        """The frame of the right factor of a matrix product; the contracted dim becomes ``axis``."""

        def view(tensor: Tensor) -> Tensor:
            inner = tensor.select(-2, 0).unsqueeze(-2).broadcast_to(tuple(result))
            return _with_axis(self.view(inner), tensor.shape[-2], tensor.stride(-2))

        return Frame((*self.axes, axis), view)

    def row(self, result: Sequence[int], axis: str) -> "Frame":
        """The frame of a factor whose last dim is contracted and whose others line up with the result's last ones."""

        def view(tensor: Tensor) -> Tensor:
            inner = tensor.select(-1, 0).broadcast_to(tuple(result))
            return _with_axis(self.view(inner), tensor.shape[-1], tensor.stride(-1))

        return Frame((*self.axes, axis), view)


def _with_axis(tensor: Tensor, size: int, stride: int) -> Tensor:
    return tensor.as_strided((*tensor.shape, size), (*tensor.stride(), stride), tensor.storage_offset())


def fresh(axis: str, axes: Sequence[str]) -> str:
    """``axis``, primed until it is none of ``axes``: the second axis of a family in one frame."""
    while axis in axes:
        axis += "'"
    return axis


@dataclass(frozen=True)
class Operand:
    """A node to hand to an operator, to be viewed as ``shape`` when its own differs; ``reader`` first read it."""

    node: Node
    shape: tuple[int, ...]
    reader: Node


@dataclass(frozen=True)
class Occurrence:
    """A leaf of a match: ``node`` as it is used, ``chain`` of views from ``base`` up to it, the frame it is used in."""

    node: Node
    base: Node
    chain: tuple[Node, ...]
    frame: Frame
    user: Node | None = None

    def sizes(self) -> dict[str, int]:
        """The size of each axis of the frame."""
        view = self._view(0)
        return {} if view is None else dict(zip(self.frame.axes, view.shape, strict=True))

    def strides(self, start: int = 0) -> tuple[dict[str, int], int] | None:
        """Stride by axis family, and offset, over the chain's node ``start`` (0 = the base); None if inexpressible.

        Of several axes of one family the last (innermost reduction) counts; the node must not vary along the others.
        """
        view = self._view(start)
        if view is None:
            return None
        found: dict[str, int] = {}
        for axis, size, stride in zip(self.frame.axes, view.shape, view.stride(), strict=True):
            family = axis.rstrip("'")
            if found.get(family, 0):
                return None
            found[family] = stride if size > 1 else 0
        return found, int(view.storage_offset())

    def _view(self, start: int) -> Tensor | None:
        node = self.base if start == 0 else self.chain[start - 1]
        try:
            return self.frame.view(replay(self.chain[start:], base_tensor(node)))
        except EXPRESSION_ERRORS:
            return None

    def node_at(self, start: int) -> Node:
        """The node whose elements ``strides(start)`` speaks of."""
        return self.base if start == 0 else self.chain[start - 1]

    def reader_at(self, start: int) -> Node:
        """The node that reads that node's memory: the first copy above it, else what uses the leaf."""
        copies = [node for node in self.chain[start:] if node.target in COPIES or is_cast(node)]
        return copies[0] if copies else (self.user or self.node)


def row_major(axes: str, sizes: Mapping[str, int]) -> dict[str, int]:
    """Strides of a contiguous tensor of those axes, 0 where a size is 1."""
    strides = contiguous([sizes[axis] for axis in axes]).strides
    return dict(zip(axes, strides, strict=True))


def operand(
    what: str, occurrence: Occurrence, axes: str, sizes: Mapping[str, int], want: Sequence[int] = ()
) -> Operand:
    """The innermost node that holds the leaf as a tensor of exactly those axes, in that order.

    A node of the shape ``want`` (default: one dim an axis) is preferred; else one of other shape and equal elements, to
    be viewed. Refused with the nearest layout found when there is none.
    """
    want = tuple(want) or tuple(sizes[axis] for axis in axes)
    expected, seen = row_major(axes, sizes), "nothing of that size"
    exact: list[int] = []
    other: list[int] = []
    for start in range(len(occurrence.chain) + 1):
        node = occurrence.node_at(start)
        if prod(shape(node)) != prod(want):
            continue
        found = occurrence.strides(start)
        seen = f"layout {found} of {node.name} {list(shape(node))}"
        if found is None or found[1] != 0 or not _same(found[0], expected):
            continue
        if shape(node) == want:
            exact.append(start)
        elif _viewable(node, want):
            other.append(start)
    if not exact and not other:
        raise Refused(f"{what} is not [{', '.join(axes)}] = {list(want)}: {seen}, wanted {expected}", occurrence.node)
    start = (exact or other)[0]
    return Operand(occurrence.node_at(start), want, occurrence.reader_at(start))


def _same(found: Mapping[str, int], expected: Mapping[str, int]) -> bool:
    return all(found.get(axis, 0) == expected.get(axis, 0) for axis in {*found, *expected})


def _viewable(node: Node, want: Sequence[int]) -> bool:
    value = node.meta["val"]
    try:
        torch.empty_strided(value.shape, value.stride(), device="meta").view(tuple(want))
    except EXPRESSION_ERRORS:
        return False
    return True


def require_layout(what: str, occurrence: Occurrence, strides: Mapping[str, int], offset: int = 0) -> None:
    """Refuse unless the leaf varies over its base by exactly those strides per axis, from that offset."""
    found = occurrence.strides()
    if found is None or found[1] != offset or not _same(found[0], strides):
        raise Refused(
            f"{what} has layout {found} over {occurrence.base.name}, wanted {(dict(strides), offset)}", occurrence.node
        )


def require_type(what: str, node: Node, allowed: Sequence[torch.dtype]) -> None:
    """Refuse a tensor of another element type."""
    if dtype(node) not in allowed:
        names = ", ".join(str(item).removeprefix("torch.") for item in allowed)
        raise Refused(f"{what} is {str(dtype(node)).removeprefix('torch.')}, wanted {names}", node)
