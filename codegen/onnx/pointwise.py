"""Elementwise operators of ATen as ONNX."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from kimigraph.codegen.onnx.translation import Handler, Translation, arguments, tensor_of


def _simple(kind: str) -> Handler:
    def translate(t: Translation, node: Node) -> str:
        return t.scope.op(kind, t.name(arguments(node)["self"], tensor_of(node).dtype))

    return translate


Formula = Callable[[Translation, str, Callable[[float], str]], str]


def _composed(formula: Formula) -> Handler:
    """A formula over the operand; its third argument makes a constant of the operand's type."""

    def translate(t: Translation, node: Node) -> str:
        dtype = tensor_of(node).dtype
        return formula(t, t.name(arguments(node)["self"], dtype), lambda x: t.scope.constant(x, dtype))

    return translate


def _binary(kind: str) -> Handler:
    def translate(t: Translation, node: Node) -> str:
        a, dtype = arguments(node), tensor_of(node).dtype
        other = t.name(a["other"], dtype)
        if a.get("alpha", 1) != 1:
            other = t.scope.op("Mul", other, t.scope.constant(a["alpha"], dtype))
        return t.scope.op(kind, t.name(a["self"], dtype), other)

    return translate


def _meeting_type(a: Any, b: Any) -> torch.dtype:
    """The type in which two operands are compared, by torch's rules."""
    pair = [
        torch.empty(tensor_of(x).shape, dtype=tensor_of(x).dtype, device="meta") if isinstance(x, Node) else x
        for x in (a, b)
    ]
    return torch.result_type(pair[0], pair[1])


def _comparison(kind: str, negated: bool = False) -> Handler:
    def translate(t: Translation, node: Node) -> str:
        a = arguments(node)
        dtype = _meeting_type(a["self"], a["other"])
        if dtype == torch.bool and kind != "Equal":
            dtype = torch.int32
        result = t.scope.op(kind, t.name(a["self"], dtype), t.name(a["other"], dtype))
        return t.scope.op("Not", result) if negated else result

    return translate


def _logical(kind: str, bitwise: str) -> Handler:
    """A logical operator, bit by bit for integers."""

    def translate(t: Translation, node: Node) -> str:
        a, dtype = arguments(node), tensor_of(node).dtype
        name = kind if dtype == torch.bool else bitwise
        operands = [t.name(a[key], dtype) for key in ("self", "other") if key in a]
        return t.scope.op(name, *operands)

    return translate


def _floor_divided(t: Translation, left: str, right: str, dtype: torch.dtype) -> str:
    if dtype.is_floating_point:
        return t.scope.op("Floor", t.scope.op("Div", left, right))
    rest = t.scope.op("Mod", left, right)  # integer Div truncates
    return t.scope.op("Div", t.scope.op("Sub", left, rest), right)


def _divide(t: Translation, node: Node) -> str:
    a, dtype = arguments(node), tensor_of(node).dtype
    mode = a.get("rounding_mode")
    left, right = t.name(a["self"], dtype), t.name(a["other"], dtype)
    if mode == "floor":
        return _floor_divided(t, left, right, dtype)
    quotient = t.scope.op("Div", left, right)
    if mode is None or not dtype.is_floating_point:
        return quotient
    return t.scope.op("Mul", t.scope.op("Sign", quotient), t.scope.op("Floor", t.scope.op("Abs", quotient)))


def _floor_divide(t: Translation, node: Node) -> str:
    a, dtype = arguments(node), tensor_of(node).dtype
    return _floor_divided(t, t.name(a["self"], dtype), t.name(a["other"], dtype), dtype)


def _remainder(t: Translation, node: Node) -> str:
    a, dtype = arguments(node), tensor_of(node).dtype
    left, right = t.name(a["self"], dtype), t.name(a["other"], dtype)
    if not dtype.is_floating_point:
        return t.scope.op("Mod", left, right)
    whole = _floor_divided(t, left, right, dtype)
    return t.scope.op("Sub", left, t.scope.op("Mul", whole, right))


def _where(t: Translation, node: Node) -> str:
    a, dtype = arguments(node), tensor_of(node).dtype
    return t.scope.op("Where", t.name(a["condition"]), t.name(a["self"], dtype), t.name(a["other"], dtype))


def _masked_fill(t: Translation, node: Node) -> str:
    a, dtype = arguments(node), tensor_of(node).dtype
    return t.scope.op("Where", t.name(a["mask"]), t.name(a["value"], dtype), t.name(a["self"], dtype))


def _clamp(t: Translation, node: Node) -> str:
    a, dtype = arguments(node), tensor_of(node).dtype
    name = t.name(a["self"], dtype)
    if a.get("min") is not None:
        name = t.scope.op("Max", name, t.name(a["min"], dtype))
    return name if a.get("max") is None else t.scope.op("Min", name, t.name(a["max"], dtype))


def _logaddexp(t: Translation, node: Node) -> str:
    """max + log(1 + exp(-|a - b|)); where both are the same infinity, that is the result."""
    a, dtype = arguments(node), tensor_of(node).dtype
    left, right, s = t.name(a["self"], dtype), t.name(a["other"], dtype), t.scope
    top = s.op("Max", left, right)
    gap = s.op("Neg", s.op("Abs", s.op("Sub", left, right)))
    sum_ = s.op("Add", top, s.op("Log", s.op("Add", s.constant(1.0, dtype), s.op("Exp", gap))))
    return s.op("Where", s.op("IsInf", top), top, sum_)


def _nan_to_num(t: Translation, node: Node) -> str:
    a, dtype = arguments(node), tensor_of(node).dtype
    name, s, limits = t.name(a["self"]), t.scope, torch.finfo(dtype)
    values = {"nan": (a["nan"], 0.0), "posinf": (a["posinf"], limits.max), "neginf": (a["neginf"], limits.min)}
    new = {key: s.constant(default if given is None else given, dtype) for key, (given, default) in values.items()}
    result = s.op("Where", s.op("IsNaN", name), new["nan"], name)
    result = s.op("Where", s.op("Equal", name, s.constant(math.inf, dtype)), new["posinf"], result)
    return s.op("Where", s.op("Equal", name, s.constant(-math.inf, dtype)), new["neginf"], result)


def _power(t: Translation, node: Node) -> str:
    a, dtype = arguments(node), tensor_of(node).dtype
    return t.scope.op("Pow", t.name(a["self"], dtype), t.name(a["exponent"], dtype))


def _gelu(t: Translation, node: Node) -> str:
    a = arguments(node)
    return t.scope.op("Gelu", t.name(a["self"]), approximate=a["approximate"])


def _cast(t: Translation, node: Node) -> str:
    name = arguments(node)["self"]
    return t.name(name, tensor_of(node).dtype)


def _is_infinite(positive: bool) -> Handler:
    def translate(t: Translation, node: Node) -> str:
        value = arguments(node)["self"]
        limit = t.scope.constant(math.inf if positive else -math.inf, tensor_of(value).dtype)
        return t.scope.op("Equal", t.name(value), limit)

    return translate


def _is_nan(t: Translation, node: Node) -> str:
    return t.scope.op("IsNaN", t.name(arguments(node)["self"]))


def _softplus(t: Translation, node: Node) -> str:
    a, dtype = arguments(node), tensor_of(node).dtype
    beta = t.scope.constant(a["beta"], dtype)
    name = t.name(a["self"])
    if a["beta"] == 1:
        return t.scope.op("Softplus", name)
    return t.scope.op("Div", t.scope.op("Softplus", t.scope.op("Mul", name, beta)), beta)


_SAME = ("clone", "contiguous", "alias", "detach", "lift_fresh_copy", "_to_copy", "to", "type_as")
POINTWISE: dict[str, Handler] = {
    **{
        kind.lower(): _simple(kind)
        for kind in ("Abs", "Neg", "Exp", "Log", "Sqrt", "Sigmoid", "Tanh", "Cos", "Sin", "Relu", "Reciprocal")
    },
    **{kind.lower(): _simple(kind) for kind in ("Floor", "Ceil", "Round", "Erf", "Sign")},
    "rsqrt": _composed(lambda t, x, c: t.scope.op("Reciprocal", t.scope.op("Sqrt", x))),
    "silu": _composed(lambda t, x, c: t.scope.op("Mul", x, t.scope.op("Sigmoid", x))),
    "square": _composed(lambda t, x, c: t.scope.op("Mul", x, x)),
    "log1p": _composed(lambda t, x, c: t.scope.op("Log", t.scope.op("Add", x, c(1)))),
    "expm1": _composed(lambda t, x, c: t.scope.op("Sub", t.scope.op("Exp", x), c(1))),
    "exp2": _composed(lambda t, x, c: t.scope.op("Pow", c(2), x)),
    "softplus": _softplus,
    "gelu": _gelu,
    **{name: _binary(kind) for name, kind in (("add", "Add"), ("sub", "Sub"), ("mul", "Mul"))},
    "maximum": _binary("Max"),
    "minimum": _binary("Min"),
    "div": _divide,
    "floor_divide": _floor_divide,
    "remainder": _remainder,
    "pow": _power,
    "eq": _comparison("Equal"),
    "ne": _comparison("Equal", negated=True),
    "lt": _comparison("Less"),
    "le": _comparison("LessOrEqual"),
    "gt": _comparison("Greater"),
    "ge": _comparison("GreaterOrEqual"),
    **{name: _logical("And", "BitwiseAnd") for name in ("__and__", "bitwise_and", "logical_and")},
    **{name: _logical("Or", "BitwiseOr") for name in ("__or__", "bitwise_or", "logical_or")},
    **{name: _logical("Xor", "BitwiseXor") for name in ("__xor__", "bitwise_xor", "logical_xor")},
    **{name: _logical("Not", "BitwiseNot") for name in ("bitwise_not", "logical_not")},
    "isnan": _is_nan,
    "isneginf": _is_infinite(False),
    "isposinf": _is_infinite(True),
    "where": _where,
    "masked_fill": _masked_fill,
    "clamp": _clamp,
    "clamp_min": _clamp,
    "clamp_max": _clamp,
    "logaddexp": _logaddexp,
    "nan_to_num": _nan_to_num,
    **dict.fromkeys(_SAME, _cast),
}
"""Translations by the bare name of the ATen operator."""
