"""Where an element of a view lies in the tensor below it."""

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Node

from kimigraph.ir.pointwise.index import ZERO, Index, flattened, unflattened
from kimigraph.ir.pointwise.unfusable import Unfusable
from kimigraph.ir.schemas import argument

ATEN = torch.ops.aten
Position = tuple[Index, ...]
SPLITS = frozenset(
    (ATEN.split_with_sizes.default, ATEN.split.Tensor, ATEN.split.sizes, ATEN.chunk.default, ATEN.unbind.int)
)


def shape_of(node: Node) -> tuple[int, ...]:
    """The static sizes of a node's tensor; Unfusable without."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or any(isinstance(size, torch.SymInt) for size in value.shape):
        raise Unfusable("it has no static shape", node)
    return tuple(value.shape)


def is_split_item(node: Node) -> bool:
    """Whether the node takes one part of a split."""
    source = node.args[0] if node.target is operator.getitem else None
    return isinstance(source, Node) and source.target in SPLITS


def is_index_map(node: Node) -> bool:
    """Whether each element of the node is an element of its first argument at another place."""
    return node.op == "call_function" and (node.target in _MAPS or is_split_item(node))


def view_source(node: Node) -> Node:
    """The tensor below a view; below the split for one of its parts."""
    source = node.args[0]
    assert isinstance(source, Node)
    if is_split_item(node):
        source = source.args[0]
        assert isinstance(source, Node)
    return source


def through_view(node: Node, position: Position) -> Position:
    """The index in ``view_source(node)`` of the element of ``node`` at ``position``."""
    shape = shape_of(view_source(node))
    if is_split_item(node):
        return _split(node, position, shape)
    return _MAPS[node.target](node, position, shape)


def _reshaped(node: Node, position: Position, shape: Sequence[int]) -> Position:
    return unflattened(flattened(position, shape_of(node)), shape)


def _squeezed(node: Node, position: Position, shape: Sequence[int]) -> Position:
    """Of squeeze and unsqueeze: the dims above 1 stay in their order."""
    moved = iter(index for index, size in zip(position, shape_of(node), strict=True) if size != 1)
    return tuple(ZERO if size == 1 else next(moved) for size in shape)


def _expanded(node: Node, position: Position, shape: Sequence[int]) -> Position:
    del node
    inner = position[len(position) - len(shape) :]
    return tuple(ZERO if size == 1 else index for index, size in zip(inner, shape, strict=True))


def _transposed(node: Node, position: Position, shape: Sequence[int]) -> Position:
    a, b = (int(argument(node, name)) % len(shape) for name in ("dim0", "dim1"))
    moved = list(position)
    moved[a], moved[b] = moved[b], moved[a]
    return tuple(moved)


def _swapped(node: Node, position: Position, shape: Sequence[int]) -> Position:
    del node, shape
    return (*position[:-2], *reversed(position[-2:]))


def _permuted(node: Node, position: Position, shape: Sequence[int]) -> Position:
    moved = [ZERO] * len(shape)
    for index, dim in zip(position, argument(node, "dims"), strict=True):
        moved[dim % len(shape)] = index
    return tuple(moved)


def _selected(node: Node, position: Position, shape: Sequence[int]) -> Position:
    dim, index = int(argument(node, "dim")) % len(shape), int(argument(node, "index"))
    fixed = Index((), index % shape[dim])
    return (*position[:dim], fixed, *position[dim:])


def _sliced(node: Node, position: Position, shape: Sequence[int]) -> Position:
    dim, start, step = slice_of(node, shape)
    return (*position[:dim], position[dim] * step + start, *position[dim + 1 :])


def slice_of(node: Node, shape: Sequence[int]) -> tuple[int, int, int]:
    """(dim, start, step) of a slice or narrow of that shape."""
    dim = int(argument(node, "dim")) % len(shape)
    start: Any = argument(node, "start")
    step = 1 if "narrow" in str(node.target) else int(argument(node, "step"))
    size = shape[dim]
    start = 0 if start is None else int(start)
    return dim, min(max(start + size if start < 0 else start, 0), size), step


def _split(node: Node, position: Position, shape: Sequence[int]) -> Position:
    source, item = node.args
    assert isinstance(source, Node) and isinstance(item, int)
    dim = int(argument(source, "dim")) % len(shape)
    parts: Sequence[torch.Tensor] = source.meta["val"]
    item %= len(parts)
    if source.target is ATEN.unbind.int:
        return (*position[:dim], Index((), item), *position[dim:])
    start = sum(int(part.shape[dim]) for part in parts[:item])
    return (*position[:dim], position[dim] + start, *position[dim + 1 :])


def _flipped(node: Node, position: Position, shape: Sequence[int]) -> Position:
    dims = {dim % len(shape) for dim in argument(node, "dims")}
    return tuple(index * -1 + (shape[dim] - 1) if dim in dims else index for dim, index in enumerate(position))


def _repeated(node: Node, position: Position, shape: Sequence[int]) -> Position:
    inner = position[len(position) - len(shape) :]
    return tuple(index % size if size > 1 else ZERO for index, size in zip(inner, shape, strict=True))


def _interleaved(node: Node, position: Position, shape: Sequence[int]) -> Position:
    repeats: Any = argument(node, "repeats")
    dim: Any = argument(node, "dim")
    if dim is None:
        return unflattened(position[0] // int(repeats), shape)
    dim = int(dim) % len(shape)
    return (*position[:dim], position[dim] // int(repeats), *position[dim + 1 :])


_Map = Callable[[Node, Position, Sequence[int]], Position]
_MAPS: dict[Any, _Map] = {
    **dict.fromkeys(
        (
            *(ATEN.view.default, ATEN.reshape.default, ATEN._unsafe_view.default),
            *(ATEN.flatten.using_ints, ATEN.unflatten.int),
        ),
        _reshaped,
    ),
    **dict.fromkeys((ATEN.unsqueeze.default, ATEN.squeeze.default, ATEN.squeeze.dim, ATEN.squeeze.dims), _squeezed),
    **dict.fromkeys((ATEN.alias.default, ATEN.detach.default, ATEN.expand.default), _expanded),
    **dict.fromkeys((ATEN.slice.Tensor, ATEN.narrow.default), _sliced),
    **dict.fromkeys((ATEN.t.default, ATEN.mT.default), _swapped),
    ATEN.transpose.int: _transposed,
    ATEN.permute.default: _permuted,
    ATEN.select.int: _selected,
    ATEN.flip.default: _flipped,
    ATEN.repeat.default: _repeated,
    ATEN.repeat_interleave.self_int: _interleaved,
}
