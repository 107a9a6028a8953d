"""Products, reductions and selections of ATen as ONNX."""

import math
from typing import Any

import torch
from torch.fx import Node

from kimigraph.codegen.onnx.translation import Handler, Translation, arguments, tensor_of


def _linear(t: Translation, node: Node) -> str:
    a = arguments(node)
    turned = t.permuted(t.name(a["weight"]), [1, 0])
    product = t.scope.op("MatMul", t.name(a["input"]), turned)
    return product if a["bias"] is None else t.scope.op("Add", product, t.name(a["bias"]))


def _matmul(t: Translation, node: Node) -> str:
    a = arguments(node)
    second = next(a[key] for key in ("mat2", "other", "vec", "tensor") if key in a)
    return t.scope.op("MatMul", t.name(a["self"]), t.name(second))


def _einsum(t: Translation, node: Node) -> str:
    a = arguments(node)
    return t.scope.op("Einsum", *(t.name(operand) for operand in a["tensors"]), equation=a["equation"])


def _addmm(t: Translation, node: Node) -> str:
    a, dtype = arguments(node), tensor_of(node).dtype
    product = t.scope.op("MatMul", t.name(a["mat1"]), t.name(a["mat2"]))
    if a["alpha"] != 1:
        product = t.scope.op("Mul", product, t.scope.constant(a["alpha"], dtype))
    addend = t.name(a["self"])
    if a["beta"] != 1:
        addend = t.scope.op("Mul", addend, t.scope.constant(a["beta"], dtype))
    return t.scope.op("Add", product, addend)


def _conv1d(t: Translation, node: Node) -> str:
    a = arguments(node)
    operands = [t.name(a[key]) for key in ("input", "weight", "bias") if a[key] is not None]
    (pad,) = a["padding"]
    return t.scope.op(
        "Conv",
        *operands,
        strides=list(a["stride"]),
        pads=[pad, pad],
        dilations=list(a["dilation"]),
        group=a["groups"],
    )


def _axes(dims: Any, rank: int) -> list[int]:
    chosen = range(rank) if dims is None else [dims] if isinstance(dims, int) else dims or range(rank)
    return sorted(dim % max(rank, 1) for dim in chosen)


def reduced(t: Translation, kind: str, name: str, axes: list[int], keep: bool) -> str:
    """``name`` reduced over ``axes``."""
    return t.scope.op(kind, name, t.scope.integers(axes), keepdims=int(keep)) if axes else name


def _reduction(kind: str) -> Handler:
    def translate(t: Translation, node: Node) -> str:
        a, result = arguments(node), tensor_of(node)
        source = tensor_of(a["self"])
        axes = _axes(a.get("dim"), source.dim())
        return reduced(t, kind, t.name(a["self"], result.dtype), axes, bool(a.get("keepdim", False)))

    return translate


def _quantifier(kind: str) -> Handler:
    """``any`` and ``all``: the largest and the smallest of zeros and ones."""

    def translate(t: Translation, node: Node) -> str:
        a = arguments(node)
        source = tensor_of(a["self"])
        truth = t.name(a["self"], torch.bool)
        axes = _axes(a.get("dim"), source.dim())
        numbers = t.scope.op("Cast", truth, to=torch.int32)
        return t.scope.op("Cast", reduced(t, kind, numbers, axes, bool(a.get("keepdim", False))), to=torch.bool)

    return translate


def _extreme(largest: bool) -> Handler:
    """``max.dim`` and ``min.dim``: value and place; without a dim or for two tensors the value alone."""
    kinds = ("ReduceMax", "ArgMax", "Max") if largest else ("ReduceMin", "ArgMin", "Min")

    def translate(t: Translation, node: Node) -> Any:
        a = arguments(node)
        rank, name = tensor_of(a["self"]).dim(), t.name(a["self"])
        if "other" in a:
            return t.scope.op(kinds[2], name, t.name(a["other"]))
        if "dim" not in a:
            return reduced(t, kinds[0], name, _axes(None, rank), False)
        axis, keep = a["dim"] % max(rank, 1), bool(a["keepdim"])
        values = reduced(t, kinds[0], name, [axis], keep)
        return values, t.scope.op(kinds[1], name, axis=axis, keepdims=int(keep))

    return translate


def _arg(kind: str) -> Handler:
    def translate(t: Translation, node: Node) -> str:
        a = arguments(node)
        source, name = tensor_of(a["self"]), t.name(a["self"])
        if a["dim"] is None:
            name, axis = t.reshaped(name, (source.numel(),)), 0
        else:
            axis = a["dim"] % source.dim()
        return t.scope.op(kind, name, axis=axis, keepdims=int(a["keepdim"]))

    return translate


def _softmax(t: Translation, node: Node) -> str:
    a, result = arguments(node), tensor_of(node)
    return t.scope.op("Softmax", t.name(a["self"], result.dtype), axis=a["dim"] % result.dim())


def _logsumexp(t: Translation, node: Node) -> str:
    """Around the largest value; a row of -inf alone stays -inf."""
    a, s = arguments(node), t.scope
    source, dtype = tensor_of(a["self"]), tensor_of(node).dtype
    axes, name, keep = _axes(a["dim"], source.dim()), t.name(a["self"]), bool(a["keepdim"])
    top = reduced(t, "ReduceMax", name, axes, True)
    finite = s.op("Where", s.op("IsInf", top), s.constant(0.0, dtype), top)
    summed = reduced(t, "ReduceSum", s.op("Exp", s.op("Sub", name, finite)), axes, True)
    result = s.op("Add", s.op("Log", summed), finite)
    return result if keep else t.reshaped(result, tensor_of(node).shape)


def _layer_norm(t: Translation, node: Node) -> str:
    a, s = arguments(node), t.scope
    source = tensor_of(a["input"])
    shape = list(a["normalized_shape"])
    weight = t.name(a["weight"]) if a["weight"] is not None else s.constant(torch.ones(shape), source.dtype)
    operands = [t.name(a["input"]), weight, *([t.name(a["bias"])] if a["bias"] is not None else [])]
    return s.op("LayerNormalization", *operands, axis=-len(shape), epsilon=a["eps"])


def _rms_norm(t: Translation, node: Node) -> str:
    a, s = arguments(node), t.scope
    source = tensor_of(a["input"])
    axes = list(range(source.dim() - len(a["normalized_shape"]), source.dim()))
    wide = t.name(a["input"], torch.float32)
    eps = a["eps"] if a["eps"] is not None else torch.finfo(source.dtype).eps
    mean = reduced(t, "ReduceMean", s.op("Mul", wide, wide), axes, True)
    scale = s.op("Reciprocal", s.op("Sqrt", s.op("Add", mean, s.constant(eps, torch.float32))))
    normed = t.cast(s.op("Mul", wide, scale), torch.float32, source.dtype)
    return normed if a["weight"] is None else s.op("Mul", normed, t.name(a["weight"], source.dtype))


def _attention(t: Translation, node: Node) -> str:
    a, s = arguments(node), t.scope
    query, key, dtype = tensor_of(a["query"]), tensor_of(a["key"]), tensor_of(node).dtype
    scale = a["scale"] if a["scale"] is not None else query.shape[-1] ** -0.5
    order = [*range(key.dim() - 2), key.dim() - 1, key.dim() - 2]
    scores = s.op("MatMul", t.name(a["query"]), t.permuted(t.name(a["key"]), order))
    scores = s.op("Mul", scores, s.constant(scale, dtype))
    if a["is_causal"]:
        seen = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool).tril()
        scores = s.op("Where", s.constant(seen, torch.bool), scores, s.constant(-math.inf, dtype))
    mask = a["attn_mask"]
    if mask is not None and tensor_of(mask).dtype == torch.bool:
        scores = s.op("Where", t.name(mask), scores, s.constant(-math.inf, dtype))
    elif mask is not None:
        scores = s.op("Add", scores, t.name(mask, dtype))
    return s.op("MatMul", s.op("Softmax", scores, axis=-1), t.name(a["value"]))


def _cumsum(t: Translation, node: Node) -> str:
    a, dtype = arguments(node), tensor_of(node).dtype
    return t.scope.op("CumSum", t.name(a["self"], dtype), t.scope.constant(a["dim"], torch.int64))


def sorted_rows(t: Translation, name: str, dtype: torch.dtype, count: Any, axis: int, largest: bool) -> tuple[str, str]:
    """The first ``count`` of each row and their places; equal values by their place, as ONNX has it."""
    if dtype in (torch.bool, torch.uint8, torch.int8, torch.int16):
        name, wide = t.scope.op("Cast", name, to=torch.int32), torch.int32
    else:
        wide = dtype
    values, places = t.scope.add("TopK", (name, t.integers([count])), 2, axis=axis, largest=int(largest), sorted=1)
    return t.cast(values, wide, dtype), places


def _sort(t: Translation, node: Node) -> tuple[str, str]:
    a = arguments(node)
    source = tensor_of(a["self"])
    axis = a["dim"] % source.dim()
    return sorted_rows(t, t.name(a["self"]), source.dtype, source.shape[axis], axis, bool(a["descending"]))


def _argsort(t: Translation, node: Node) -> str:
    return _sort(t, node)[1]


def _topk(t: Translation, node: Node) -> tuple[str, str]:
    a = arguments(node)
    source = tensor_of(a["self"])
    return sorted_rows(t, t.name(a["self"]), source.dtype, a["k"], a["dim"] % source.dim(), bool(a["largest"]))


PRODUCTS: dict[str, Handler] = {
    "linear": _linear,
    **dict.fromkeys(("matmul", "mm", "bmm", "mv", "dot"), _matmul),
    "einsum": _einsum,
    "addmm": _addmm,
    "conv1d": _conv1d,
    "sum": _reduction("ReduceSum"),
    "mean": _reduction("ReduceMean"),
    "prod": _reduction("ReduceProd"),
    "amax": _reduction("ReduceMax"),
    "amin": _reduction("ReduceMin"),
    "any": _quantifier("ReduceMax"),
    "all": _quantifier("ReduceMin"),
    "max": _extreme(largest=True),
    "min": _extreme(largest=False),
    "argmax": _arg("ArgMax"),
    "argmin": _arg("ArgMin"),
    **dict.fromkeys(("softmax", "_softmax"), _softmax),
    "logsumexp": _logsumexp,
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    "scaled_dot_product_attention": _attention,
    "cumsum": _cumsum,
    "sort": _sort,
    "argsort": _argsort,
    "topk": _topk,
}
"""Translations by the bare name of the ATen operator."""
