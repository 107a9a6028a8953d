"""Operators of ATen that gather and scatter, as ONNX."""

from collections.abc import Collection
from typing import Any

import torch
from torch.fx import Node

from kimigraph.codegen.onnx.layout import bounds
from kimigraph.codegen.onnx.translation import Handler, Translation, arguments, masks_of, tensor_of
from kimigraph.ir.open_sizes import met, sized


def _embedding(t: Translation, node: Node) -> str:
    a = arguments(node)
    return t.scope.op("Gather", t.name(a["weight"]), t.name(a["indices"]), axis=0)


def _index_select(t: Translation, node: Node) -> str:
    a = arguments(node)
    return t.scope.op("Gather", t.name(a["self"]), t.name(a["index"], torch.int64), axis=a["dim"])


def _gather(t: Translation, node: Node) -> str:
    a = arguments(node)
    return t.scope.op("GatherElements", t.name(a["self"]), t.name(a["index"], torch.int64), axis=a["dim"])


def _indexed(indices: list[Any]) -> dict[int, Node]:
    return {dim: index for dim, index in enumerate(indices) if index is not None}


def _places(t: Translation, found: dict[int, Node]) -> tuple[str, tuple[Any, ...]]:
    """The indices side by side, int64 [..., n], and the shape that they have together."""
    shape = met(tuple(map(sized, tensor_of(index).shape)) for index in found.values())
    assert shape is not None
    columns = [t.reshaped(t.expanded(t.name(index, torch.int64), shape), (*shape, 1)) for index in found.values()]
    return columns[0] if len(columns) == 1 else t.scope.op("Concat", *columns, axis=len(shape)), shape


def _front(found: Collection[int], rank: int) -> list[int]:
    """The axes with the indexed ones, ``found``, first."""
    return [*found, *(dim for dim in range(rank) if dim not in found)]


def _result_order(found: dict[int, Node], rank: int, width: int) -> list[int]:
    """From [indices.., rest..] to where torch puts the indices' axes: in place of neighbours, in front of others."""
    dims = list(found)
    if dims != list(range(dims[0], dims[0] + len(dims))):
        return list(range(width + rank - len(dims)))
    rest = list(range(width, width + rank - len(dims)))
    return [*rest[: dims[0]], *range(width), *rest[dims[0] :]]


def _index(t: Translation, node: Node) -> str:
    a = arguments(node)
    found, source = _indexed(a["indices"]), tensor_of(a["self"])
    if len(found) == 1:
        ((dim, index),) = found.items()
        if masks_of(node):
            return t.scope.op("Gather", t.name(a["self"]), _picked(t, t.name(index, torch.bool)), axis=dim)
        return t.scope.op("Gather", t.name(a["self"]), t.name(index, torch.int64), axis=dim)
    places, shape = _places(t, found)
    picked = t.scope.op("GatherND", t.permuted(t.name(a["self"]), _front(found, source.dim())), places)
    return t.permuted(picked, _result_order(found, source.dim(), len(shape)))


def _picked(t: Translation, mask: str) -> str:
    """The places [n] that a mask of one axis picks, in order."""
    return t.scope.op("Squeeze", t.scope.op("NonZero", mask), t.scope.integers([0]))


def _nonzero(t: Translation, node: Node) -> str:
    return t.scope.op("Transpose", t.scope.op("NonZero", t.name(arguments(node)["self"])), perm=[1, 0])


def _inverse(order: list[int]) -> list[int]:
    return [order.index(place) for place in range(len(order))]


def _index_put(t: Translation, node: Node) -> str:
    a, result = arguments(node), tensor_of(node)
    found = _indexed(a["indices"])
    places, shape = _places(t, found)
    front, order = _front(found, result.dim()), _result_order(found, result.dim(), len(shape))
    rest = [result.shape[dim] for dim in front[len(found) :]]
    updates = t.name(a["values"], result.dtype)
    together = [*shape, *rest]
    updates = t.permuted(t.expanded(updates, [together[place] for place in order]), _inverse(order))
    reduction = "add" if a["accumulate"] else None
    target = t.permuted(t.name(a["self"]), front)
    return t.permuted(t.scope.op("ScatterND", target, places, updates, reduction=reduction), _inverse(front))


def _index_copy(t: Translation, node: Node) -> str:
    a, result = arguments(node), tensor_of(node)
    dim = a["dim"] % result.dim()
    front = _front([dim], result.dim())
    places = t.reshaped(t.name(a["index"], torch.int64), (tensor_of(a["index"]).numel(), 1))
    source = t.permuted(t.name(a["source"], result.dtype), front)
    written = t.scope.op("ScatterND", t.permuted(t.name(a["self"]), front), places, source)
    return t.permuted(written, _inverse(front))


def _scatter(reduction: str | None) -> Handler:
    def translate(t: Translation, node: Node) -> str:
        a, result = arguments(node), tensor_of(node)
        index = t.name(a["index"], torch.int64)
        shape = tensor_of(a["index"]).shape
        if "value" in a:
            updates = t.expanded(t.scope.constant(a["value"], result.dtype), shape)
        else:
            updates = t.name(a["src"], result.dtype)
            for axis, size in enumerate(shape):
                if tensor_of(a["src"]).shape[axis] != size:
                    updates = t.sliced(updates, axis, 0, size)
        kind = None if result.dtype == torch.bool else reduction
        return t.scope.op("ScatterElements", t.name(a["self"]), index, updates, axis=a["dim"], reduction=kind)

    return translate


def replaced(t: Translation, whole: str, shape: torch.Size, part: str, axis: int, start: int, end: int) -> str:
    """``whole`` with the places ``start`` to ``end`` of an axis taken from ``part``."""
    pieces = [part]
    if start > 0:
        pieces.insert(0, t.sliced(whole, axis, 0, start))
    if end < shape[axis]:
        pieces.append(t.sliced(whole, axis, end, int(shape[axis])))
    return pieces[0] if len(pieces) == 1 else t.scope.op("Concat", *pieces, axis=axis)


def _slice_scatter(t: Translation, node: Node) -> str:
    a, result = arguments(node), tensor_of(node)
    axis = a["dim"] % result.dim()
    start, end = bounds(a["start"], a["end"], result.shape[axis])
    part = t.name(a["src"], result.dtype)
    if a["step"] == 1:
        return replaced(t, t.name(a["self"]), result.shape, part, axis, start, end)
    front = _front([axis], result.dim())
    places = t.scope.constant([[place] for place in range(start, end, a["step"])], torch.int64)
    written = t.scope.op("ScatterND", t.permuted(t.name(a["self"]), front), places, t.permuted(part, front))
    return t.permuted(written, _inverse(front))


def _select_scatter(t: Translation, node: Node) -> str:
    a, result = arguments(node), tensor_of(node)
    axis = a["dim"] % result.dim()
    place = a["index"] % result.shape[axis]
    part = t.scope.op("Unsqueeze", t.name(a["src"], result.dtype), t.scope.integers([axis]))
    return replaced(t, t.name(a["self"]), result.shape, part, axis, place, place + 1)


INDEXING: dict[str, Handler] = {
    "embedding": _embedding,
    "index_select": _index_select,
    "gather": _gather,
    "index": _index,
    "nonzero": _nonzero,
    "index_put": _index_put,
    "index_copy": _index_copy,
    "scatter": _scatter(None),
    "scatter_add": _scatter("add"),
    "slice_scatter": _slice_scatter,
    "select_scatter": _select_scatter,
}
"""Translations by the bare name of the ATen operator."""
