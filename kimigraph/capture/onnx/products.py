"""Products, norms, reductions and selections of ONNX as ATen."""

from typing import Any

from kimigraph.capture.onnx.attention import attention
from kimigraph.capture.onnx.builder import ATEN, Value
from kimigraph.capture.onnx.call import Call, Handler
from kimigraph.capture.onnx.layout import permuted, reshaped
from kimigraph.capture.onnx.numbers import shortest
from kimigraph.capture.onnx.pointwise import cast_to
from kimigraph.ir.open_sizes import OpenSize


def _matmul(c: Call) -> Value:
    """A product with a weight on the right is ``linear``: the weight as models keep it, [out, in]."""
    x, y = c.operand(0), c.operand(1)
    weight = _kept_weight(c, y)
    if weight is not None and x.rank >= 1:
        return c.build.call(ATEN.linear.default, x, weight)
    attended = attention(c, x, y)
    if attended is not None:
        return attended
    if x.rank == y.rank == 3 and x.shape[0] == y.shape[0]:
        return c.build.call(ATEN.bmm.default, x, y)
    return c.build.call(ATEN.matmul.default, x, y)


def _kept_weight(c: Call, value: Value) -> Value | None:
    """The weight [out, in] of which ``value`` [in, out] is the transpose; None for what is no weight."""
    node = value.node
    if value.rank != 2 or node is None:
        return None
    if node.op == "get_attr":
        return permuted(c, value, [1, 0])
    inner: Any = node.args[0] if node.args else None
    if node.target is ATEN.transpose.int and inner.op == "get_attr":
        return Value(inner.meta["val"], inner)
    return None


def _gemm(c: Call) -> Value:
    a, b, addend = c.operand(0), c.operand(1), c.optional(2)
    alpha, beta = float(c.attribute("alpha", 1.0)), float(c.attribute("beta", 1.0))
    a = permuted(c, a, [1, 0]) if c.attribute("transA", 0) else a
    turned = permuted(c, b, [1, 0])
    right, weight = (turned, b) if c.attribute("transB", 0) else (b, turned)
    if alpha == beta == 1.0 and (addend is None or addend.rank == 1):
        return c.build.call(ATEN.linear.default, a, weight, addend)
    product = c.build.call(ATEN.mm.default, a, right)
    product = c.build.call(ATEN.mul.Tensor, product, alpha) if alpha != 1.0 else product
    if addend is None:
        return product
    return c.build.call(ATEN.add.Tensor, product, addend, alpha=beta)


def _einsum(c: Call) -> Value:
    operands = [c.operand(place) for place in range(len(c.operands))]
    return c.build.call(ATEN.einsum.default, c.attribute("equation", ""), operands)


def _conv(c: Call) -> Value:
    x, weight, bias = c.operand(0), c.operand(1), c.optional(2)
    if bias is not None and bias.known is not None and not bool(bias.known.any()):
        bias = None  # exporters write one where the model has none
    width = x.rank - 2
    if c.attribute("auto_pad", "NOTSET") not in ("NOTSET", "VALID"):
        raise c.refused(f"has auto_pad {c.attribute('auto_pad')}; explicit pads are taken")
    pads = c.attribute("pads", [0] * (2 * width))
    if pads[:width] != pads[width:]:
        flat = [size for axis in reversed(range(width)) for size in (pads[axis], pads[axis + width])]
        x, pads = c.build.call(ATEN.constant_pad_nd.default, x, flat, 0.0), [0] * (2 * width)
    if width not in (1, 2, 3):
        raise c.refused(f"is over {width} axes; 1 to 3 are taken")
    target = {1: ATEN.conv1d.default, 2: ATEN.conv2d.default, 3: ATEN.conv3d.default}[width]
    ones = [1] * width
    strides, dilations = c.attribute("strides", ones), c.attribute("dilations", ones)
    return c.build.call(target, x, weight, bias, strides, pads[:width], dilations, c.attribute("group", 1))


def _reduction(kind: str) -> Handler:
    def translate(c: Call) -> Value:
        x, axes = c.operand(0), c.numbers(1, "axes")
        keep = bool(c.attribute("keepdims", 1))
        if not axes:
            if axes is not None and c.attribute("noop_with_empty_axes", 0):
                return x
            axes = list(range(x.rank))
        dims = [c.checked_axis(axis, x.rank) for axis in axes]
        return cast_to(c, _reduced(c, kind, x, dims, keep), x.dtype) if dims else x

    return translate


def _reduced(c: Call, kind: str, x: Value, dims: list[int], keep: bool) -> Value:
    call = c.build.call
    if kind == "ReduceSum":
        return call(ATEN.sum.dim_IntList, x, dims, keep)
    if kind == "ReduceMean":
        return call(ATEN.mean.dim, x, dims, keep)
    if kind in ("ReduceMax", "ReduceMin"):
        return call(ATEN.amax.default if kind == "ReduceMax" else ATEN.amin.default, x, dims, keep)
    if kind == "ReduceProd":
        for dim in sorted(dims, reverse=True):
            x = call(ATEN.prod.dim_int, x, dim, keep)
        return x
    if kind == "ReduceLogSumExp":
        return call(ATEN.logsumexp.default, x, dims, keep)
    squares = call(ATEN.sum.dim_IntList, call(ATEN.mul.Tensor, x, x), dims, keep)
    return call(ATEN.sqrt.default, squares) if kind == "ReduceL2" else squares


def _arg(target: Any) -> Handler:
    def translate(c: Call) -> Value:
        x = c.operand(0)
        if c.attribute("select_last_index", 0):
            raise c.refused("picks the last of equal values; the first is taken")
        return c.build.call(target, x, c.axis(x.rank, 0), bool(c.attribute("keepdims", 1)))

    return translate


def _softmax(target: Any) -> Handler:
    return lambda c: c.build.call(target, c.operand(0), c.axis(c.operand(0).rank, -1))


def _layer_norm(c: Call) -> Value:
    x = c.operand(0)
    shape = list(x.shape[c.axis(x.rank, -1) :])
    if len([name for name in c.node.outputs if name]) > 1:
        raise c.refused("also returns mean or deviation, which has no translation")
    weight, bias = (reshaped(c, value, shape) if value is not None else None for value in (c.operand(1), c.optional(2)))
    return c.build.call(ATEN.layer_norm.default, x, shape, weight, bias, shortest(c.attribute("epsilon", 1e-5)))


def _rms_norm(c: Call) -> Value:
    x = c.operand(0)
    shape = list(x.shape[c.axis(x.rank, -1) :])
    return c.build.call(ATEN.rms_norm.default, x, shape, c.operand(1), shortest(c.attribute("epsilon", 1e-5)))


def _cumsum(c: Call) -> Value:
    x, axes = c.operand(0), c.needed(1)
    if c.attribute("exclusive", 0) or c.attribute("reverse", 0):
        raise c.refused("is exclusive or reversed, which has no translation")
    return cast_to(c, c.build.call(ATEN.cumsum.default, x, c.checked_axis(axes[0], x.rank)), x.dtype)


def _top_k(c: Call) -> tuple[Value, ...]:
    """Equal values go by their place, lower first, as the standard says: a stable sort, cut.

    In a file that torch.onnx or kimigraph wrote it was ``torch.topk``, which has no such rule, and is that again.
    """
    x, sizes = c.operand(0), c.numbers(1)
    axis, largest = c.axis(x.rank, -1), bool(c.attribute("largest", 1))
    is_open = any(isinstance(size, OpenSize) for size in (*(sizes or ()), x.shape[axis]))
    if not sizes or len(sizes) != 1 or not (is_open or 0 <= sizes[0] <= x.shape[axis]):
        raise c.refused(f"picks {sizes} of an axis of {x.shape[axis]}")
    if c.from_torch and (is_open or sizes[0] < x.shape[axis] or sizes[0] == 1):
        ordered = bool(c.attribute("sorted", 1))
        return c.build.call(ATEN.topk.default, x, sizes[0], axis, largest, ordered)
    whole = c.build.call(ATEN.sort.stable, x, stable=True, dim=axis, descending=largest)
    if sizes[0] == x.shape[axis]:
        return whole
    return tuple(c.build.call(ATEN.slice.Tensor, part, axis, 0, sizes[0]) for part in whole)


PRODUCTS: dict[str, Handler] = {
    "MatMul": _matmul,
    "Gemm": _gemm,
    "Einsum": _einsum,
    "Conv": _conv,
    **{
        f"Reduce{name}": _reduction(f"Reduce{name}")
        for name in ("Sum", "Mean", "Max", "Min", "Prod", "SumSquare", "L2", "LogSumExp")
    },
    "ArgMax": _arg(ATEN.argmax.default),
    "ArgMin": _arg(ATEN.argmin.default),
    "Softmax": _softmax(ATEN.softmax.int),
    "LogSoftmax": _softmax(ATEN.log_softmax.int),
    "LayerNormalization": _layer_norm,
    "RMSNormalization": _rms_norm,
    "CumSum": _cumsum,
    "TopK": _top_k,
}
"""Translations by the operator's name in the standard domain."""
