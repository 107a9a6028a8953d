"""Operators of ONNX that join and cut tensors, as ATen."""

from dataclasses import dataclass
from typing import Any

import torch

from kimigraph.capture.onnx.builder import ATEN, Value
from kimigraph.capture.onnx.call import Call, Handler, scalar
from kimigraph.ir.open_sizes import OpenSize, smaller


def _concat(c: Call) -> Value:
    parts = [c.operand(place) for place in range(len(c.operands))]
    axis = c.axis(parts[0].rank, 0)
    return parts[0] if len(parts) == 1 else c.build.call(ATEN.cat.default, parts, axis)


def _split(c: Call) -> tuple[Value, ...]:
    x, sizes = c.operand(0), c.numbers(1, "split")
    axis = c.axis(x.rank, 0)
    if sizes is None:
        count = max(int(c.attribute("num_outputs", len(c.node.outputs))), 1)
        step = -(-x.shape[axis] // count)
        sizes = [max(min(step, x.shape[axis] - step * part), 0) for part in range(count)]
    if sum(sizes) != x.shape[axis] or min(sizes, default=0) < 0:
        raise c.refused(f"splits an axis of {x.shape[axis]} into {sizes}")
    return c.build.call(ATEN.split_with_sizes.default, x, sizes, axis)


@dataclass(frozen=True)
class TensorSequence(Value):
    """Several values under one name; ``form`` is that of the first."""

    items: tuple[Value, ...] = ()


def _split_to_sequence(c: Call) -> Value:
    x, sizes = c.operand(0), c.numbers(1)
    axis = c.axis(x.rank, 0)
    keep = sizes is not None or bool(c.attribute("keepdims", 1))
    scalar_size = sizes is not None and c.operand(1).rank == 0
    step = sizes[0] if sizes and scalar_size else 1
    if step < 1:
        raise c.refused(f"splits into parts of {step}")
    if sizes is None or scalar_size:
        sizes = [min(step, x.shape[axis] - start) for start in range(0, x.shape[axis], step)]
    if sum(sizes) != x.shape[axis] or min(sizes, default=0) < 0:
        raise c.refused(f"splits an axis of {x.shape[axis]} into {sizes}")
    parts = c.build.call(ATEN.split_with_sizes.default, x, sizes, axis)
    parts = parts if keep else tuple(c.build.call(ATEN.squeeze.dim, part, axis) for part in parts)
    return TensorSequence(parts[0].form, items=tuple(parts))


def _sequence_at(c: Call) -> Value:
    sequence, place = c.operand(0), scalar(c.operand(1))
    count = len(sequence.items) if isinstance(sequence, TensorSequence) else 0
    if not isinstance(sequence, TensorSequence) or place is None or not -count <= place < count:
        raise c.refused("picks from what is no sequence, or a place of it that is not known")
    return sequence.items[int(place)]


def _slice(c: Call) -> Value:
    x = c.operand(0)
    starts, ends = c.needed(1), c.needed(2)
    axes = c.numbers(3, default=list(range(len(starts)))) or []
    steps = c.numbers(4, default=[1] * len(starts)) or []
    result = x
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        result = _sliced(c, result, c.checked_axis(axis, x.rank), start, end, step)
    return result


def _sliced(c: Call, value: Value, axis: int, start: int, end: int, step: int) -> Value:
    size = value.shape[axis]
    if step == 0:
        raise c.refused("has a step of 0")
    if any(isinstance(number, OpenSize) for number in (size, start, end)):
        return _open_slice(c, value, axis, start, end, step)
    first, last, step = slice(start, None if step < 0 and end < -size else end, step).indices(size)
    if step < 0:
        places = c.build.constant(list(range(first, last, step)), torch.int64)
        return c.build.call(ATEN.index_select.default, value, axis, places)
    if (first, max(first, last), step) == (0, size, 1):
        return value
    part = _joined_part(value, axis, first, last) if step == 1 else None
    return part or c.build.call(ATEN.slice.Tensor, value, axis, first, max(first, last), step)


def _open_slice(c: Call, value: Value, axis: int, start: Any, end: Any, step: int) -> Value:
    """A slice of which the run alone knows a bound: from a place of the front, to one of the front or to the end."""
    if step != 1 or isinstance(start, OpenSize) or start < 0 or (isinstance(end, int) and end < 0):
        raise c.refused(f"cuts {start}:{end}:{step} from an axis of {value.shape[axis]}, which the run alone knows")
    return c.build.call(ATEN.slice.Tensor, value, axis, start, smaller(end, value.shape[axis]))


def _joined_part(value: Value, axis: int, first: int, last: int) -> Value | None:
    """The part that was joined into ``value`` at just that place."""
    node = value.node
    if node is None or node.target is not ATEN.cat.default or (len(node.args) > 1 and node.args[1] != axis):
        return None
    parts: Any = node.args[:1]
    start = 0
    for part in parts[0]:
        size = int(part.meta["val"].shape[axis])
        if (start, start + size) == (first, last):
            return Value(part.meta["val"], part)
        start += size
    return None


def _pad(c: Call) -> Value:
    x, pads = c.operand(0), c.needed(1, "pads")
    if c.attribute("mode", "constant") != "constant":
        raise c.refused(f"pads by {c.attribute('mode')}; constant is taken")
    axes = c.numbers(3, default=list(range(x.rank))) or []
    value = c.optional(2)
    number = 0 if value is None else scalar(value)
    if number is None:
        raise c.refused("pads with a value of the run; a constant is taken")
    pairs = {c.checked_axis(axis, x.rank): (pads[n], pads[n + len(axes)]) for n, axis in enumerate(axes)}
    flat = [size for axis in reversed(range(x.rank)) for size in pairs.get(axis, (0, 0))]
    while len(flat) > 2 and flat[-2:] == [0, 0]:
        flat = flat[:-2]
    return c.build.call(ATEN.constant_pad_nd.default, x, flat, number)


def _tile(c: Call) -> Value:
    return c.build.call(ATEN.repeat.default, c.operand(0), c.needed(1))


JOINING: dict[str, Handler] = {
    "Concat": _concat,
    "Split": _split,
    "SplitToSequence": _split_to_sequence,
    "SequenceAt": _sequence_at,
    "Slice": _slice,
    "Pad": _pad,
    "Tile": _tile,
}
"""Translations by the operator's name in the standard domain."""
