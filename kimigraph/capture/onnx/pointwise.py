"""Elementwise operators of ONNX as ATen."""

from typing import Any

import torch

from kimigraph.capture.onnx.builder import ATEN, Value
from kimigraph.capture.onnx.call import Call, Handler, fits_as_number, scalar
from kimigraph.ir.open_sizes import met


def _unary(target: Any) -> Handler:
    return lambda c: c.build.call(target, c.operand(0))


def _binary(packet: Any) -> Handler:
    """A number on the right stays a number, for patterns read those; so does one on the left that may change sides."""

    def translate(c: Call) -> Value:
        a, b = c.operand(0), c.operand(1)
        if packet in _COMMUTATIVE and fits_as_number(a, b):
            a, b = b, a
        if fits_as_number(b, a):
            return c.build.call(packet.Tensor, a, scalar(b))
        return c.build.call(packet.Tensor, a, b)

    return translate


_COMMUTATIVE = (ATEN.add, ATEN.mul)


def _multiply(c: Call) -> Value:
    """``x * sigmoid(x)`` is SiLU again."""
    for x, gate in ((c.operand(0), c.operand(1)), (c.operand(1), c.operand(0))):
        made = gate.node
        if made is not None and made.target is ATEN.sigmoid.default and made.args[0] is x.node:
            return c.build.call(ATEN.silu.default, x)
    return _binary(ATEN.mul)(c)


def _reciprocal(c: Call) -> Value:
    x = c.operand(0)
    if x.node is not None and x.node.target is ATEN.sqrt.default:
        root: Any = x.node.args[0]
        return c.build.call(ATEN.rsqrt.default, Value(root.meta["val"], root))
    return c.build.call(ATEN.reciprocal.default, x)


def _divide(c: Call) -> Value:
    a, b = c.operand(0), c.operand(1)
    if not a.dtype.is_floating_point:
        return c.build.call(ATEN.div.Tensor_mode, a, b, rounding_mode="trunc")
    return _binary(ATEN.div)(c)


def _modulo(c: Call) -> Value:
    packet = ATEN.fmod if c.attribute("fmod", 0) else ATEN.remainder
    a, b = c.operand(0), c.operand(1)
    if fits_as_number(b, a):
        return c.build.call(packet.Scalar, a, scalar(b))
    return c.build.call(packet.Tensor, a, b)


def _power(c: Call) -> Value:
    a, b = c.operand(0), c.operand(1)
    if fits_as_number(b, a):
        result = c.build.call(ATEN.pow.Tensor_Scalar, a, scalar(b))
    elif fits_as_number(a, b):
        result = c.build.call(ATEN.pow.Scalar, scalar(a), b)
    else:
        result = c.build.call(ATEN.pow.Tensor_Tensor, a, b)
    return cast_to(c, result, a.dtype)


def _comparison(packet: Any) -> Handler:
    def translate(c: Call) -> Value:
        a, b = c.operand(0), c.operand(1)
        return c.build.call(packet.Scalar, a, scalar(b)) if fits_as_number(b, a) else c.build.call(packet.Tensor, a, b)

    return translate


def _bounded(c: Call, value: Value, bound: str, number: float) -> Value:
    """``value`` clamped on one side; where it was on the other before, on both at once."""
    node, bounds = value.node, {bound: number}
    if node is not None and node.target is ATEN.clamp.default and not node.kwargs.keys() & {bound}:
        both: dict[str, Any] = {**node.kwargs, **bounds}
        if both.get("min", number) <= both.get("max", number):
            inner: Any = node.args[0]
            value, bounds = Value(inner.meta["val"], inner), both
    return c.build.call(ATEN.clamp.default, value, **bounds)


def _extreme(target: Any) -> Handler:
    def translate(c: Call) -> Value:
        result = c.operand(0)
        for place in range(1, len(c.operands)):
            other = c.operand(place)
            bound = "min" if target is ATEN.maximum.default else "max"
            if fits_as_number(other, result):
                result = _bounded(c, result, bound, scalar(other))
            elif fits_as_number(result, other):
                result = _bounded(c, other, bound, scalar(result))
            else:
                result = c.build.call(target, result, other)
        return result

    return translate


def _summed(c: Call) -> Value:
    result = c.operand(0)
    for place in range(1, len(c.operands)):
        result = c.build.call(ATEN.add.Tensor, result, c.operand(place))
    return result


def _where(c: Call) -> Value:
    condition, a, b = c.operand(0), c.operand(1), c.operand(2)
    if fits_as_number(a, b) and met([condition.shape, b.shape]) == b.shape:
        return c.build.call(ATEN.masked_fill.Scalar, b, condition, scalar(a))
    if fits_as_number(b, a) and met([condition.shape, a.shape]) == a.shape:
        return c.build.call(ATEN.masked_fill.Scalar, a, negated(c, condition), scalar(b))
    return c.build.call(ATEN.where.self, condition, a, b)


def negated(c: Call, condition: Value) -> Value:
    """The opposite of a condition; of one that is an opposite, the condition itself."""
    node = condition.node
    inner: Any = node.args[0] if node is not None and node.args else None
    if node is not None and node.target is ATEN.bitwise_not.default:
        return Value(inner.meta["val"], inner)
    return c.build.call(ATEN.bitwise_not.default, condition)


def _clip(c: Call) -> Value:
    low, high = (c.optional(place) for place in (1, 2))
    bounds = {"min": low, "max": high}
    if low is None and high is None:
        return c.operand(0)
    known = {name: scalar(value) for name, value in bounds.items() if value is not None}
    if all(number is not None for number in known.values()):
        return c.build.call(ATEN.clamp.default, c.operand(0), **known)
    return c.build.call(ATEN.clamp.Tensor, c.operand(0), **{k: v for k, v in bounds.items() if v is not None})


def cast_to(c: Call, value: Value, dtype: torch.dtype) -> Value:
    """``value`` in another type."""
    return value if value.dtype == dtype else c.build.call(ATEN.to.dtype, value, dtype)


def _cast(c: Call) -> Value:
    dtype = ELEMENT_TYPES.get(c.attribute("to"))
    if dtype is None:
        raise c.refused(f"casts to element type {c.attribute('to')}, which no tensor here has")
    x = c.operand(0)
    return (_any_or_all(c, x) if dtype == torch.bool else None) or cast_to(c, x, dtype)


def _any_or_all(c: Call, value: Value) -> Value | None:
    """The largest or least of truths as numbers is whether any or all hold; None for other values."""
    reduced: Any = value.node
    if reduced is None or reduced.target not in (ATEN.amax.default, ATEN.amin.default) or len(reduced.args[1]) != 1:
        return None
    counted: Any = reduced.args[0]
    truths: Any = counted.args[0] if counted.target is ATEN.to.dtype else None
    if truths is None or truths.meta["val"].dtype != torch.bool:
        return None
    target = ATEN.any.dim if reduced.target is ATEN.amax.default else ATEN.all.dim
    return c.build.call(target, Value(truths.meta["val"], truths), reduced.args[1][0], bool(reduced.args[2]))


ELEMENT_TYPES = {
    1: torch.float32,
    2: torch.uint8,
    3: torch.int8,
    5: torch.int16,
    6: torch.int32,
    7: torch.int64,
    9: torch.bool,
    10: torch.float16,
    11: torch.float64,
    16: torch.bfloat16,
}
"""Element types by ONNX' numbers."""


def _is_inf(c: Call) -> Value:
    x = c.operand(0)
    positive, negative = c.attribute("detect_positive", 1), c.attribute("detect_negative", 1)
    if positive and negative:
        return c.build.call(ATEN.isinf.default, x)
    return c.build.call(ATEN.eq.Scalar, x, float("inf") if positive else float("-inf"))


def _logical(target: Any) -> Handler:
    return lambda c: c.build.call(target, c.operand(0), c.operand(1))


POINTWISE: dict[str, Handler] = {
    **{
        name: _unary(getattr(ATEN, name.lower()).default)
        for name in ("Abs", "Neg", "Exp", "Log", "Sqrt", "Sigmoid", "Tanh", "Cos", "Sin", "Relu", "Floor", "Ceil")
    },
    **{name: _unary(getattr(ATEN, name.lower()).default) for name in ("Round", "Erf", "Sign", "Softplus")},
    "Reciprocal": _reciprocal,
    "Gelu": lambda c: c.build.call(ATEN.gelu.default, c.operand(0), approximate=c.attribute("approximate", "none")),
    "LeakyRelu": lambda c: c.build.call(ATEN.leaky_relu.default, c.operand(0), c.attribute("alpha", 0.01)),
    "Identity": lambda c: c.operand(0),
    "Dropout": lambda c: c.operand(0),
    "Add": _binary(ATEN.add),
    "Sub": _binary(ATEN.sub),
    "Mul": _multiply,
    "Div": _divide,
    "Mod": _modulo,
    "Pow": _power,
    "Equal": _comparison(ATEN.eq),
    "Less": _comparison(ATEN.lt),
    "LessOrEqual": _comparison(ATEN.le),
    "Greater": _comparison(ATEN.gt),
    "GreaterOrEqual": _comparison(ATEN.ge),
    "Max": _extreme(ATEN.maximum.default),
    "Min": _extreme(ATEN.minimum.default),
    "Sum": _summed,
    "Where": _where,
    "Clip": _clip,
    "Cast": _cast,
    "CastLike": lambda c: cast_to(c, c.operand(0), c.operand(1).dtype),
    "IsNaN": _unary(ATEN.isnan.default),
    "IsInf": _is_inf,
    "Not": lambda c: negated(c, c.operand(0)),
    "And": _logical(ATEN.__and__.Tensor),
    "Or": _logical(ATEN.__or__.Tensor),
    "Xor": _logical(ATEN.bitwise_xor.Tensor),
    "BitwiseNot": _unary(ATEN.bitwise_not.default),
    **{f"Bitwise{name}": _logical(getattr(ATEN, f"bitwise_{name.lower()}").Tensor) for name in ("And", "Or", "Xor")},
}
"""Translations by the operator's name in the standard domain."""
