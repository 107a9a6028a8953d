"""Lists of sizes of which some are known in the run alone: ONNX computes shapes as tensors of integers."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from kimigraph.capture.onnx.builder import Value
from kimigraph.capture.onnx.call import Call, Handler
from kimigraph.capture.onnx.joining import JOINING
from kimigraph.capture.onnx.layout import LAYOUT, size_list
from kimigraph.ir.open_sizes import larger, smaller

MOVED = ("Squeeze", "Unsqueeze", "Reshape", "Flatten", "Transpose", "Slice", "Expand")


def computes_sizes(call: Call) -> bool:
    """Whether an operand is such a list, and the node makes another of it."""
    read = call.operands[:1] if call.node.op in (*MOVED, "Gather", "Cast", "Identity") else call.operands
    return call.node.op in SIZE_LISTS and any(v is not None and v.numbers is not None for v in read)


def _numbers(c: Call, value: Value) -> list[Any]:
    if value.numbers is not None:
        return list(value.numbers)
    if value.known is None or value.dtype.is_floating_point:
        raise c.refused("mixes sizes that the run alone knows with other values")
    return [int(number) for number in value.known.reshape(-1).tolist()]


def _places(value: Value, first: int = 0) -> Value:
    """The places of a list instead of its numbers."""
    known = first + torch.arange(value.form.numel()).reshape(value.shape)
    return Value(known, known=known)


def _moved(handler: Handler) -> Handler:
    """The same numbers elsewhere: the node is translated for their places."""

    def translate(c: Call) -> Value:
        x = c.operand(0)
        numbers = _numbers(c, x)
        places = handler(replace(c, operands=(_places(x), *c.operands[1:]))).known
        assert places is not None
        return size_list(tuple(places.shape), [numbers[place] for place in places.reshape(-1).tolist()], x.dtype)

    return translate


def _gather(c: Call) -> Value:
    x, places = c.operand(0), _numbers(c, c.operand(1))
    if not all(isinstance(place, int) and -x.form.numel() <= place < x.form.numel() for place in places):
        raise c.refused(f"picks the places {places} of {x.form.numel()} sizes")
    numbers = _numbers(c, x)
    if x.rank != 1:
        raise c.refused("picks of sizes that are no list")
    return size_list(c.operand(1).shape, [numbers[place] for place in places], x.dtype)


def _concat(c: Call) -> Value:
    parts = [c.operand(place) for place in range(len(c.operands))]
    numbers, placed = list[Any](), list[Value]()
    for part in parts:
        placed.append(_places(part, len(numbers)))
        numbers += _numbers(c, part)
    places = JOINING["Concat"](replace(c, operands=tuple(placed))).known
    return size_list(tuple(places.shape), [numbers[place] for place in places.reshape(-1).tolist()], parts[0].dtype)


def _computed(function: Callable[[Any, Any], Any]) -> Handler:
    def translate(c: Call) -> Value:
        result = c.operand(0)
        for place in range(1, len(c.operands)):
            result = _pairwise(c, function, result, c.operand(place))
        return result

    return translate


def _pairwise(c: Call, function: Callable[[Any, Any], Any], a: Value, b: Value) -> Value:
    left, right = torch.broadcast_tensors(*(_places(value).form for value in (a, b)))
    mine, theirs = _numbers(c, a), _numbers(c, b)
    pairs = zip(left.reshape(-1).tolist(), right.reshape(-1).tolist(), strict=True)
    return size_list(tuple(left.shape), [function(mine[i], theirs[j]) for i, j in pairs], a.dtype)


def _cast(c: Call) -> Value:
    if c.attribute("to") not in (6, 7):
        raise c.refused("makes other numbers of sizes that the run alone knows")
    x = c.operand(0)
    return size_list(x.shape, _numbers(c, x), torch.int32 if c.attribute("to") == 6 else torch.int64)


def _quotient(a: Any, b: Any) -> Any:
    return a // b


SIZE_LISTS: dict[str, Handler] = {
    **{name: _moved({**LAYOUT, **JOINING}[name]) for name in MOVED},
    "Identity": lambda c: c.operand(0),
    "Cast": _cast,
    "Gather": _gather,
    "Concat": _concat,
    "Add": _computed(lambda a, b: a + b),
    "Sub": _computed(lambda a, b: a - b),
    "Mul": _computed(lambda a, b: a * b),
    "Div": _computed(_quotient),
    "Min": _computed(smaller),
    "Max": _computed(larger),
}
"""Translations where an operand is a list of sizes, by the operator's name."""
