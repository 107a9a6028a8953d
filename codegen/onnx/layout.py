"""Operators of ATen that move, join and make tensors, as ONNX. All shapes are known, so views are reshapes."""

from typing import Any

import torch
from torch.fx import Node

from kimigraph.codegen.onnx.translation import Handler, Translation, arguments, tensor_of


def _view(t: Translation, node: Node) -> str:
    source = arguments(node)["self"]
    return t.reshaped(t.name(source), tensor_of(node).shape)


def _expand(t: Translation, node: Node) -> str:
    source = arguments(node)["self"]
    return t.expanded(t.name(source), tensor_of(node).shape)


def _permute(t: Translation, node: Node) -> str:
    a, rank = arguments(node), tensor_of(node).dim()
    return t.permuted(t.name(a["self"]), [dim % rank for dim in a["dims"]])


def _transpose(t: Translation, node: Node) -> str:
    a, rank = arguments(node), tensor_of(node).dim()
    order = list(range(rank))
    first, second = (a.get("dim0", 0) % max(rank, 1), a.get("dim1", rank - 1) % max(rank, 1))
    if rank:
        order[first], order[second] = order[second], order[first]
    return t.permuted(t.name(a["self"]), order)


def bounds(start: Any, end: Any, size: int) -> tuple[int, int]:
    """Where a slice begins and ends, as Python and torch clamp it."""
    first, last, _ = slice(start, end).indices(size)
    return first, max(first, last)


def _slice(t: Translation, node: Node) -> str:
    a = arguments(node)
    source = tensor_of(a["self"])
    axis = a["dim"] % source.dim()
    start, end = bounds(a["start"], a["end"], source.shape[axis])
    if (start, end, a["step"]) == (0, source.shape[axis], 1):
        return t.name(a["self"])
    return t.sliced(t.name(a["self"]), axis, start, end, a["step"])


def _select(t: Translation, node: Node) -> str:
    a = arguments(node)
    source = tensor_of(a["self"])
    axis = a["dim"] % source.dim()
    return t.scope.op("Gather", t.name(a["self"]), t.scope.constant(a["index"], torch.int64), axis=axis)


def _split(t: Translation, node: Node) -> tuple[str, ...]:
    a = arguments(node)
    name, axis = t.name(a["self"]), a["dim"] % tensor_of(a["self"]).dim()
    parts: list[str] = []
    start = 0
    for piece in node.meta["val"]:
        size = int(piece.shape[axis])
        parts.append(t.sliced(name, axis, start, start + size))
        start += size
    return tuple(parts)


def _unbind(t: Translation, node: Node) -> tuple[str, ...]:
    a = arguments(node)
    name, axis = t.name(a["self"]), a["dim"] % tensor_of(a["self"]).dim()
    return tuple(
        t.scope.op("Gather", name, t.scope.constant(place, torch.int64), axis=axis)
        for place in range(len(node.meta["val"]))
    )


def _concatenate(t: Translation, node: Node) -> str:
    a, result = arguments(node), tensor_of(node)
    # Torch skips parts of shape [0], whatever the others' shapes are.
    parts = [part for part in a["tensors"] if tensor_of(part).dim() == result.dim()]
    names = [t.name(part, result.dtype) for part in parts]
    return t.scope.op("Concat", *names, axis=a["dim"] % result.dim())


def _stack(t: Translation, node: Node) -> str:
    a, result = arguments(node), tensor_of(node)
    axis = t.scope.integers([a["dim"] % result.dim()])
    parts = [t.scope.op("Unsqueeze", t.name(part, result.dtype), axis) for part in a["tensors"]]
    return t.scope.op("Concat", *parts, axis=a["dim"] % result.dim())


def _pad(t: Translation, node: Node) -> str:
    a, result = arguments(node), tensor_of(node)
    pairs = list(zip(a["pad"][::2], a["pad"][1::2], strict=True))[::-1]
    pairs = [(0, 0)] * (result.dim() - len(pairs)) + pairs
    pads = t.integers([first for first, _ in pairs] + [last for _, last in pairs])
    value = t.scope.constant(a.get("value") or 0, result.dtype)
    return t.scope.op("Pad", t.name(a["self"]), pads, value)


def _repeat(t: Translation, node: Node) -> str:
    a, rank = arguments(node), tensor_of(node).dim()
    source = tensor_of(a["self"])
    name = t.reshaped(t.name(a["self"]), [1] * (rank - source.dim()) + list(source.shape))
    return t.scope.op("Tile", name, t.scope.integers(a["repeats"]))


def _repeat_interleave(t: Translation, node: Node) -> str:
    a = arguments(node)
    source, result = tensor_of(a["self"]), tensor_of(node)
    name, shape, dim = t.name(a["self"]), list(source.shape), a["dim"]
    if dim is None:
        shape, dim = [source.numel()], 0
    dim %= len(shape)
    apart = t.reshaped(name, [*shape[: dim + 1], 1, *shape[dim + 1 :]])
    return t.reshaped(t.expanded(apart, [*shape[: dim + 1], a["repeats"], *shape[dim + 1 :]]), result.shape)


def _flip(t: Translation, node: Node) -> str:
    a, source = arguments(node), tensor_of(node)
    name = t.name(a["self"])
    for dim in a["dims"]:
        places = list(range(source.shape[dim]))[::-1]
        name = t.scope.op("Gather", name, t.scope.integers(places), axis=dim % source.dim())
    return name


def _copy(t: Translation, node: Node) -> str:
    a, result = arguments(node), tensor_of(node)
    name = t.name(a["src"], result.dtype)
    return name if tensor_of(a["src"]).shape == result.shape else t.expanded(name, result.shape)


def filled(t: Translation, value: Any, result: torch.Tensor) -> str:
    """A tensor like ``result`` of one value."""
    scalar = t.scope.constant(value, result.dtype)
    return t.expanded(scalar, result.shape) if result.dim() else scalar


def _fill(value: float) -> Handler:
    return lambda t, node: filled(t, value, tensor_of(node))


def _full(t: Translation, node: Node) -> str:
    a = arguments(node)
    return filled(t, a["fill_value"], tensor_of(node))


def _fill_with(t: Translation, node: Node) -> str:
    a, result = arguments(node), tensor_of(node)
    if isinstance(a["value"], Node):
        return t.expanded(t.name(a["value"], result.dtype), result.shape)
    return filled(t, a["value"], result)


def _computed(t: Translation, node: Node) -> str:
    """What depends on no tensor is computed now."""
    target: Any = node.target
    keywords = {key: value for key, value in node.kwargs.items() if key not in ("device", "pin_memory", "layout")}
    result = target(*node.args, **keywords, device="cpu")
    return t.scope.constant(result, result.dtype)


def _triangle(upper: bool) -> Handler:
    def translate(t: Translation, node: Node) -> str:
        a, shape = arguments(node), tensor_of(node).shape
        ones = torch.ones(shape[-2:], dtype=torch.bool)
        kept = ones.triu(a["diagonal"]) if upper else ones.tril(a["diagonal"])
        zero = t.scope.constant(0, tensor_of(node).dtype)
        return t.scope.op("Where", t.scope.constant(kept, torch.bool), t.name(a["self"]), zero)

    return translate


_VIEWS = (
    "view", "_unsafe_view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "squeeze_copy",
    "unsqueeze_copy", "view_copy", "_reshape_alias",
)  # fmt: skip
LAYOUT: dict[str, Handler] = {
    **dict.fromkeys(_VIEWS, _view),
    **dict.fromkeys(("expand", "expand_copy", "expand_as", "broadcast_to"), _expand),
    "permute": _permute,
    "transpose": _transpose,
    "t": _transpose,
    "slice": _slice,
    "select": _select,
    **dict.fromkeys(("split", "split_with_sizes", "chunk"), _split),
    "unbind": _unbind,
    "cat": _concatenate,
    "stack": _stack,
    **dict.fromkeys(("constant_pad_nd", "pad"), _pad),
    "repeat": _repeat,
    "repeat_interleave": _repeat_interleave,
    "flip": _flip,
    "copy": _copy,
    **dict.fromkeys(("zeros", "zeros_like", "new_zeros", "empty", "empty_like", "new_empty", "zero"), _fill(0)),
    **dict.fromkeys(("new_empty_strided", "empty_strided", "empty_permuted"), _fill(0)),
    **dict.fromkeys(("ones", "ones_like", "new_ones"), _fill(1)),
    **dict.fromkeys(("full", "full_like", "new_full"), _full),
    "fill": _fill_with,
    **dict.fromkeys(("arange", "scalar_tensor", "eye", "linspace", "tril_indices", "triu_indices"), _computed),
    "triu": _triangle(upper=True),
    "tril": _triangle(upper=False),
}
"""Translations by the bare name of the ATen operator."""
