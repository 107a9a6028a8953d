"""Operators of ONNX that move and make tensors, as ATen."""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from kimigraph.capture.onnx.builder import ATEN, Value
from kimigraph.capture.onnx.call import Call, Handler, scalar
from kimigraph.ir.open_sizes import OpenSize, met


def _reshape(c: Call) -> Value:
    x, sizes = c.operand(0), c.needed(1)
    if not c.attribute("allowzero", 0):
        if any(size == 0 and place >= x.rank for place, size in enumerate(sizes)):
            raise c.refused(f"keeps an axis of {sizes} that its operand does not have")
        sizes = [x.shape[place] if size == 0 else size for place, size in enumerate(sizes)]
    if -1 in sizes and any(isinstance(size, OpenSize) for size in x.shape):
        sizes = _filled_in(sizes, x.shape)
    return _repeated(c, x, sizes) or _turned_pages(c, x, sizes) or reshaped(c, x, sizes)


def _filled_in(sizes: list[Any], shape: tuple[Any, ...]) -> list[Any]:
    """``sizes`` with what -1 stands for, where the number of elements is known in the run alone."""
    rest = prod(size for size in sizes if size != -1)
    missing = prod(shape) // rest
    return [missing if size == -1 else size for size in sizes]


def _turned_pages(c: Call, value: Value, sizes: list[int]) -> Value | None:
    """[.., T, D] with its leading axes joined, the last two swapped, and the leading axes taken apart again."""
    swapped = value.node
    joined: Any = swapped.args[0] if swapped is not None and swapped.target is ATEN.transpose.int else None
    if value.rank != 3 or joined is None or joined.target is not ATEN.reshape.default:
        return None
    assert swapped is not None
    inner = Value(joined.args[0].meta["val"], joined.args[0])
    same = tuple(sizes[:-2]) == inner.shape[:-2] and tuple(sizes[-2:]) == inner.shape[:-3:-1]
    if not same or set(swapped.args[1:3]) != {1, 2} or tuple(joined.meta["val"].shape[1:]) != inner.shape[-2:]:
        return None
    return c.build.call(ATEN.transpose.int, inner, inner.rank - 2, inner.rank - 1)


def _repeated(c: Call, value: Value, sizes: list[int]) -> Value | None:
    """Rows that were expanded along a new axis and then joined with the axis before it were repeated."""
    wide = value.node
    narrow: Any = wide.args[0] if wide is not None and wide.target is ATEN.expand.default else None
    if narrow is None or narrow.target is not ATEN.unsqueeze.default:
        return None
    inner: Any = narrow.args[0]
    axis, rows = int(narrow.args[1]), Value(inner.meta["val"], inner)
    count = value.shape[axis]
    shape = [*rows.shape]
    is_open = any(isinstance(size, OpenSize) for size in value.shape)
    if is_open or axis == 0 or value.shape != (*shape[:axis], count, *shape[axis:]):
        return None
    shape[axis - 1] *= count
    wanted = [shape[place] if size == -1 and place < len(shape) else size for place, size in enumerate(sizes)]
    if 1 in (count, rows.shape[axis - 1]) or wanted != shape:
        return None
    return c.build.call(ATEN.repeat_interleave.self_int, rows, count, axis - 1)


def reshaped(c: Call, value: Value, sizes: list[int] | tuple[int, ...]) -> Value:
    """``value`` in another shape; where only axes of one come or go, they are inserted or dropped."""
    if tuple(sizes) == value.shape:
        return value
    wide = [size for size in value.shape if size != 1] == [size for size in sizes if size != 1]
    if wide and value.known is None:
        narrow, places = _axes_of_one(value.shape, sizes)
        if narrow is not None and len(sizes) > value.rank:
            for place in places:
                value = c.build.call(ATEN.unsqueeze.default, value, place)
            return value
        if narrow is not None:
            return c.build.call(ATEN.squeeze.dims, value, places)
    return c.build.call(ATEN.reshape.default, value, list(sizes))


def _axes_of_one(have: Sequence[int], want: Sequence[int]) -> tuple[bool | None, list[int]]:
    """The axes of one that the longer of two shapes has beyond the shorter; None where neither holds the other."""
    short, long = sorted((list(have), list(want)), key=len)
    places: list[int] = []
    at = 0
    for place, size in enumerate(long):
        if at < len(short) and short[at] == size:
            at += 1
        elif size == 1:
            places.append(place)
        else:
            return None, []
    return (True, places) if at == len(short) and places else (None, [])


def _flatten(c: Call) -> Value:
    x = c.operand(0)
    axis = int(c.attribute("axis", 1))
    sizes = x.shape[: axis if axis >= 0 else x.rank + axis]
    first = 1
    for size in sizes:
        first *= size
    return reshaped(c, x, [first, prod(x.shape) // max(first, 1)])


def permuted(c: Call, value: Value, order: list[int]) -> Value:
    """``value`` with its axes in ``order``; of two reorderings one is left, or none."""
    node: Any = value.node
    if node is not None and node.target is ATEN.permute.default:
        inner, before = node.args[:2]
        return permuted(c, Value(inner.meta["val"], inner), [before[place] for place in order])
    if order == sorted(order):
        return value
    if node is not None and node.target is ATEN.transpose.int:
        inner, dims = node.args[0], list(range(value.rank))
        first, second = (int(str(dim)) for dim in node.args[1:3])
        dims[first], dims[second] = dims[second], dims[first]
        return permuted(c, Value(inner.meta["val"], inner), [dims[place] for place in order])
    moved = [place for place, dim in enumerate(order) if place != dim]
    if len(moved) == 2:
        return c.build.call(ATEN.transpose.int, value, *moved)
    return c.build.call(ATEN.permute.default, value, order)


def _transpose(c: Call) -> Value:
    x = c.operand(0)
    order = c.attribute("perm") or list(reversed(range(x.rank)))
    if sorted(order) != list(range(x.rank)):
        raise c.refused(f"has perm {order}, which is no order of {x.rank} axes")
    return permuted(c, x, list(order))


def _unsqueeze(c: Call) -> Value:
    x, axes = c.operand(0), c.needed(1, "axes")
    rank = x.rank + len(axes)
    result = x
    for axis in sorted(c.checked_axis(axis, rank) for axis in axes):
        result = c.build.call(ATEN.unsqueeze.default, result, axis)
    return result


def _squeeze(c: Call) -> Value:
    x, axes = c.operand(0), c.numbers(1, "axes")
    dims = [place for place, size in enumerate(x.shape) if size == 1] if axes is None else axes
    dims = [c.checked_axis(axis, x.rank) for axis in dims]
    return c.build.call(ATEN.squeeze.dims, x, dims) if dims else x


def _expand(c: Call) -> Value:
    x, sizes = c.operand(0), c.needed(1)
    shape = met([x.shape, tuple(sizes)])
    if shape is None:
        raise c.refused(f"broadcasts {list(x.shape)} and {sizes}, which do not fit")
    return x if shape == x.shape else c.build.call(ATEN.expand.default, x, list(shape))


def _filled(c: Call) -> Value:
    sizes, value = c.needed(0), c.attribute("value")
    number = torch.zeros(1) if value is None else value
    return c.build.call(ATEN.full.default, sizes, number.reshape(()).item(), dtype=number.dtype)


def _range(c: Call) -> Value:
    bounds = [scalar(c.operand(place)) for place in range(3)]
    if None in bounds:
        raise c.refused("counts between values of the run; constants are taken")
    if bounds[2] == 0:
        raise c.refused("has a step of 0")
    return c.build.call(ATEN.arange.start_step, *bounds, dtype=c.operand(0).dtype)


def _shape(c: Call) -> Value:
    shape = c.operand(0).shape
    first, last, _ = slice(c.attribute("start"), c.attribute("end")).indices(len(shape))
    return size_list((max(last - first, 0),), list(shape[first:last]))


def size_list(shape: tuple[int, ...], sizes: list[Any], dtype: torch.dtype = torch.int64) -> Value:
    """Sizes as a tensor of integers: known where all of them are."""
    if any(isinstance(size, OpenSize) for size in sizes):
        return Value(torch.empty(shape, dtype=dtype), numbers=tuple(sizes))
    known = torch.tensor(sizes, dtype=dtype).reshape(shape)
    return Value(known, known=known)


def _constant(c: Call) -> Value:
    for name, dtype in (("value_int", torch.int64), ("value_ints", torch.int64), ("value_float", torch.float32)):
        if name in c.attributes:
            return c.build.constant(c.attributes[name], dtype)
    if "value_floats" in c.attributes:
        return c.build.constant(c.attributes["value_floats"], torch.float32)
    if "value" not in c.attributes:
        raise c.refused("is no tensor of numbers")
    return c.build.constant(c.attributes["value"])


def _triangle(c: Call) -> Value:
    x, offset = c.operand(0), c.optional(1)
    number = 0 if offset is None else scalar(offset)
    if number is None:
        raise c.refused("takes its diagonal from a value of the run; a constant is taken")
    return c.build.call(ATEN.triu.default if c.attribute("upper", 1) else ATEN.tril.default, x, int(number))


LAYOUT: dict[str, Handler] = {
    "Reshape": _reshape,
    "Flatten": _flatten,
    "Transpose": _transpose,
    "Unsqueeze": _unsqueeze,
    "Squeeze": _squeeze,
    "Expand": _expand,
    "ConstantOfShape": _filled,
    "Range": _range,
    "Shape": _shape,
    "Size": lambda c: size_list((), [prod(c.operand(0).shape)]),
    "Constant": _constant,
    "Trilu": _triangle,
}
"""Translations by the operator's name in the standard domain."""
