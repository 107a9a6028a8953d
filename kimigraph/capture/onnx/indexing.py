"""Operators of ONNX that gather and scatter, as ATen."""

from math import prod
from typing import Any

import torch

from kimigraph.capture.onnx.builder import ATEN, Value
from kimigraph.capture.onnx.call import Call, Handler, scalar
from kimigraph.capture.onnx.layout import permuted, reshaped
from kimigraph.capture.onnx.pointwise import cast_to
from kimigraph.ir.open_sizes import met


def _gather(c: Call) -> Value:
    x, index = c.operand(0), c.operand(1)
    axis = c.axis(x.rank, 0)
    number = scalar(index) if index.rank == 0 else None
    if number is not None:
        if not -x.shape[axis] <= number < x.shape[axis]:
            raise c.refused(f"picks place {number} of an axis of {x.shape[axis]}")
        return c.build.call(ATEN.select.int, x, axis, number)
    mask = picked_by(index)
    if mask is not None and index.rank == 1:
        return c.build.call(ATEN.index.Tensor, x, [*[None] * axis, mask])
    if axis == 0 and x.rank == 2 and x.node is not None and x.node.op == "get_attr":
        return c.build.call(ATEN.embedding.default, x, index)
    return c.build.call(ATEN.index.Tensor, x, [*[None] * axis, index])


def _gather_elements(c: Call) -> Value:
    x = c.operand(0)
    return c.build.call(ATEN.gather.default, x, c.axis(x.rank, 0), cast_to(c, c.operand(1), torch.int64))


def _columns(c: Call, places: Value) -> list[Value]:
    """The indices of each axis, from indices side by side [..., n]."""
    width = places.shape[-1]
    if width == 1:
        return [c.build.call(ATEN.squeeze.dim, places, places.rank - 1)]
    node = places.node
    if node is not None and node.target is ATEN.cat.default:
        parts = [Value(part.meta["val"], part) for part in _parts(node.args[0])]
        if len(parts) == width and all(part.shape[-1] == 1 for part in parts):
            return [c.build.call(ATEN.squeeze.dim, part, part.rank - 1) for part in parts]
    return [c.build.call(ATEN.select.int, places, places.rank - 1, place) for place in range(width)]


def _parts(argument: object) -> list[torch.fx.Node]:
    assert isinstance(argument, list | tuple)
    return [part for part in argument if isinstance(part, torch.fx.Node)]


def _gather_nd(c: Call) -> Value:
    x, places = c.operand(0), c.operand(1)
    if c.attribute("batch_dims", 0):
        raise c.refused("has batch_dims, which has no translation: use whole indices")
    columns = _narrowed(_columns(c, places))
    mask = picked_by(columns[0]) if len(columns) == 1 and columns[0].rank == 1 else None
    if mask is None:
        return c.build.call(ATEN.index.Tensor, x, columns)
    # Where the axes were put in another order for it, rows of the axis that came first are picked before that order.
    order = _order(x)
    base = permuted(c, x, [order.index(place) for place in range(x.rank)])
    picked = c.build.call(ATEN.index.Tensor, base, [*[None] * order[0], mask])
    return permuted(c, picked, order)


def picked_by(places: Value) -> Value | None:
    """The mask of one axis of which ``places`` are all the places that it picks, in order; None for other values."""
    node: Any = places.node
    while node is not None and node.target in _VIEWS and _count(node) == _count(node.args[0]):
        node = node.args[0]
    if node is None or node.target is not ATEN.nonzero.default:
        return None
    mask: Any = node.args[0]
    return Value(mask.meta["val"], mask) if mask.meta["val"].dim() == 1 else None


def _count(node: Any) -> Any:
    return prod(Value(node.meta["val"], node).shape)


_VIEWS = (
    ATEN.transpose.int,
    ATEN.permute.default,
    ATEN.squeeze.dim,
    ATEN.squeeze.dims,
    ATEN.unsqueeze.default,
    ATEN.expand.default,
    ATEN.select.int,
)


def _narrowed(columns: list[Value]) -> list[Value]:
    """Indices before they were expanded to their common shape: picking does that itself."""
    narrow = [_before_expansion(column) for column in columns]
    return narrow if met(value.shape for value in narrow) == met(value.shape for value in columns) else columns


def _before_expansion(value: Value) -> Value:
    node: Any = value.node
    while node is not None:
        inner: Any = node.args[0] if node.args else None
        if node.target is ATEN.expand.default and inner.meta["val"].dim() == node.meta["val"].dim():
            node = inner
        elif node.target in (ATEN.squeeze.dim, ATEN.squeeze.dims) and inner.target is ATEN.unsqueeze.default:
            if tuple(inner.args[0].meta["val"].shape) != tuple(node.meta["val"].shape):
                break
            node = inner.args[0]
        else:
            break
    return value if node is None else Value(node.meta["val"], node)


def _scatter_nd(c: Call) -> Value:
    x, places, updates = c.operand(0), c.operand(1), c.operand(2)
    reduction = c.attribute("reduction", "none")
    if reduction not in ("none", "add"):
        raise c.refused(f"reduces by {reduction}; none and add are taken")
    if places.rank == 2 and places.shape[-1] == 1 and reduction == "none":
        return _written_rows(c, x, places, updates)
    return c.build.call(ATEN.index_put.default, x, _columns(c, places), updates, reduction == "add")


def _written_rows(c: Call, x: Value, places: Value, updates: Value) -> Value:
    """A write of whole rows: ``index_copy`` or, to rows known to be neighbours, ``slice_scatter``.

    Where the axes were put in another order for it, the write is along the axis that came first, before that order.
    """
    order = _order(updates if x.known is not None else x)
    inverse = [order.index(place) for place in range(x.rank)]
    base, source, axis = permuted(c, x, inverse), permuted(c, updates, inverse), order[0]
    start, count = _first_of_run(places), places.shape[0]
    if count == 0:
        return x
    if (start, count) == (0, base.shape[axis]) and source.shape == base.shape:
        return permuted(c, source, order)
    if start is not None and 0 <= start <= base.shape[axis] - count:
        first = _written_front(base, axis, start)
        if first is not None and start + count == base.shape[axis]:
            return permuted(c, c.build.call(ATEN.cat.default, [first, source], axis), order)
        written = c.build.call(ATEN.slice_scatter.default, base, source, axis, start, start + count)
    else:
        index = reshaped(c, cast_to(c, places, torch.int64), [count])
        written = c.build.call(ATEN.index_copy.default, base, axis, index, source)
    return permuted(c, written, order)


def _written_front(base: Value, axis: int, end: int) -> Value | None:
    """What was written to the places of ``axis`` before ``end``, where ``base`` was made by that write."""
    node = base.node
    if node is None or node.target is not ATEN.slice_scatter.default or node.args[2:5] != (axis, 0, end):
        return None
    part: Any = node.args[1]
    return Value(part.meta["val"], part)


def _first_of_run(places: Value) -> int | None:
    """The first of places that are known to follow one another; None for others."""
    if places.known is None or not places.known.numel():
        return None
    flat = places.known.flatten()
    run = flat[0] + torch.arange(flat.numel(), dtype=flat.dtype)
    return int(flat[0]) if torch.equal(flat, run) else None


def _order(value: Value) -> list[int]:
    """The order into which the axes of ``value`` were put last; theirs, where they were not."""
    node, order = value.node, list(range(value.rank))
    if node is not None and node.target is ATEN.transpose.int:
        first, second = (int(str(dim)) for dim in node.args[1:3])
        order[first], order[second] = order[second], order[first]
    elif node is not None and node.target is ATEN.permute.default:
        dims: Any = node.args[1]
        order = [int(dim) for dim in dims]
    return order


def _scatter_elements(c: Call) -> Value:
    x, index, updates = c.operand(0), cast_to(c, c.operand(1), torch.int64), c.operand(2)
    axis, reduction = c.axis(x.rank, 0), c.attribute("reduction", "none")
    number = _constant_fill(updates)
    if reduction == "none" and number is not None:
        return c.build.call(ATEN.scatter.value, x, axis, index, number)
    if reduction == "none":
        return c.build.call(ATEN.scatter.src, x, axis, index, updates)
    if reduction == "add":
        return c.build.call(ATEN.scatter_add.default, x, axis, index, updates)
    raise c.refused(f"reduces by {reduction}; none and add are taken")


def _constant_fill(updates: Value) -> int | float | bool | None:
    """The one number that all updates are known to be."""
    if scalar(updates) is not None:
        return scalar(updates)
    flat = None if updates.known is None else updates.known.flatten()
    if flat is not None and flat.numel() and bool((flat == flat[0]).all()):
        return flat[0].item()
    return None


def _nonzero(c: Call) -> Value:
    """The places [rank, n]; how many they are is an open size where values of the run choose them."""
    x = c.operand(0)
    if x.known is not None:
        return c.build.constant(x.known.nonzero().t().contiguous())
    mask = x if x.dtype == torch.bool else c.build.call(ATEN.ne.Scalar, x, 0)
    return c.build.call(ATEN.transpose.int, c.build.call(ATEN.nonzero.default, mask), 0, 1)


def _one_hot(c: Call) -> Value:
    index, depth, values = c.operand(0), scalar(c.operand(1)), c.operand(2)
    if depth is None:
        raise c.refused("takes its depth from a value of the run; a constant is taken")
    axis = c.checked_axis(int(c.attribute("axis", -1)), index.rank + 1)
    places = c.build.call(ATEN.arange.default, int(depth), dtype=torch.int64)
    places = reshaped(c, places, [int(depth) if place == axis else 1 for place in range(index.rank + 1)])
    wide = c.build.call(ATEN.unsqueeze.default, cast_to(c, index, torch.int64), axis)
    wide = c.build.call(ATEN.remainder.Scalar, wide, int(depth))
    off, on = (c.build.call(ATEN.select.int, values, 0, place) for place in (0, 1))
    return c.build.call(ATEN.where.self, c.build.call(ATEN.eq.Tensor, wide, places), on, off)


INDEXING: dict[str, Handler] = {
    "Gather": _gather,
    "GatherElements": _gather_elements,
    "GatherND": _gather_nd,
    "ScatterND": _scatter_nd,
    "ScatterElements": _scatter_elements,
    "NonZero": _nonzero,
    "OneHot": _one_hot,
}
"""Translations by the operator's name in the standard domain."""
