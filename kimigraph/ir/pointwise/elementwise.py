"""Rules of the operations that compute each element from the elements at the same place."""

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from kimigraph.ir.pointwise.arithmetic import Arithmetic, held
from kimigraph.ir.pointwise.reader import TYPES, Reader, Rule
from kimigraph.ir.pointwise.unfusable import Unfusable
from kimigraph.ir.pointwise.values import Guard, Value
from kimigraph.ir.pointwise.views import Position
from kimigraph.ir.schemas import bind

ATEN = torch.ops.aten
Compute = Callable[[Arithmetic, dict[str, Any]], Value | None]


def type_of(node: Node) -> torch.dtype:
    """The element type of a node; Unfusable when no kernel holds it."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.dtype not in TYPES:
        raise Unfusable("its element type has no kernel", node)
    return value.dtype


def _arithmetic(compute: Compute) -> Rule:
    """Tensors are rounded to the result's type first, numbers are not: as eager promotes them."""

    def rule(reader: Reader, node: Node, position: Position, guard: Guard) -> Value:
        dtype = type_of(node)
        given = bind(node)
        for name, value in given.items():
            if isinstance(value, Node):
                given[name] = reader.values.convert(reader.operand(value, node, position, guard), dtype)
        if dtype is torch.bool:
            raise Unfusable("arithmetic on truth values has no kernel", node)
        found = compute(reader.arithmetic, given)
        if found is None:
            raise Unfusable("no kernel raises to this power", node)
        return reader.values.convert(found, dtype, node)

    return rule


def _comparison(op: str) -> Rule:
    def rule(reader: Reader, node: Node, position: Position, guard: Guard) -> Value:
        left, right = node.args[0], node.args[1]
        common = torch.result_type(_example(left), _example(right))
        if common not in TYPES:
            raise Unfusable("its element type has no kernel", node)
        pair = [
            reader.values.convert(reader.operand(item, node, position, guard), common)
            if isinstance(item, Node)
            else reader.values.convert(reader.values.constant(_number(item, node), common), held(common))
            for item in (left, right)
        ]
        return reader.arithmetic.compare(op, pair[0], pair[1])

    return rule


def _example(given: Any) -> Any:
    return given.meta["val"] if isinstance(given, Node) else given


def _number(given: Any, node: Node) -> float | int | bool:
    if not isinstance(given, int | float):
        raise Unfusable("an operand is no tensor and no number", node)
    return given


def _logical(op: str) -> Rule:
    """Of truth values, which other operands are turned into."""

    def rule(reader: Reader, node: Node, position: Position, guard: Guard) -> Value:
        args = [
            reader.values.convert(reader.operand(item, node, position, guard), torch.bool)
            for item in node.args[: 1 if op == "not" else 2]
        ]
        return reader.values.make(op, args, torch.bool)

    return rule


def _bitwise(op: str) -> Rule:
    def rule(reader: Reader, node: Node, position: Position, guard: Guard) -> Value:
        dtype = type_of(node)
        if dtype.is_floating_point:
            raise Unfusable("bits of a floating type have no kernel", node)
        args = [
            reader.values.convert(reader.operand(item, node, position, guard), dtype)
            if isinstance(item, Node)
            else reader.values.constant(_number(item, node), dtype)
            for item in node.args
        ]
        return reader.values.make(op, args, dtype)

    return rule


def _divided(op: str) -> Rule:
    """What of a division of integers is whole, or what is left."""

    def rule(reader: Reader, node: Node, position: Position, guard: Guard) -> Value:
        dtype, given = type_of(node), bind(node)
        value, by = given["self"], given["other"]
        whole = given.get("rounding_mode", "floor") == "floor" and not dtype.is_floating_point
        if not whole or not isinstance(value, Node) or type(by) is not int or dtype is torch.bool:
            raise Unfusable("only integers are divided here, by numbers, and rounded down", node)
        if not 0 < by <= torch.iinfo(dtype).max:
            raise Unfusable(f"{by} is not positive, or more than its type holds", node)
        dividend = reader.values.convert(reader.operand(value, node, position, guard), dtype)
        return reader.values.convert(getattr(reader.arithmetic, op)(dividend, by), dtype, node)

    return rule


def _cast(reader: Reader, node: Node, position: Position, guard: Guard) -> Value:
    if node.kwargs.get("device") is not None and node.kwargs["device"] != _example(node.args[0]).device:
        raise Unfusable("it moves to another device", node)
    return reader.values.convert(reader.operand(node.args[0], node, position, guard), type_of(node), node)


def _chosen(reader: Reader, node: Node, position: Position, guard: Guard) -> Value:
    """where, masked_fill: the condition, what stands where it holds, what stands elsewhere."""
    given = bind(node)
    fill = "mask" in given
    names = ("mask", "value", "self") if fill else ("condition", "self", "other")
    dtype = type_of(node)

    def chosen(name: str) -> Value:
        item = given[name]
        if not isinstance(item, Node):
            return reader.values.constant(_number(item, node), dtype)
        return reader.values.convert(reader.operand(item, node, position, guard), dtype)

    condition = reader.operand(given[names[0]], node, position, guard)
    if condition.dtype is not torch.bool:
        raise Unfusable("the condition is no truth value", node)
    return reader.arithmetic.where(condition, chosen(names[1]), chosen(names[2]))


def _binary(op: str) -> Compute:
    def compute(a: Arithmetic, given: dict[str, Any]) -> Value:
        other = given["other"]
        alpha = given.get("alpha", 1)
        if alpha != 1:
            other = a.mul(other, alpha) if isinstance(other, Value) else other * alpha
        return getattr(a, op)(given["self"], other)

    return compute


def _reversed_sub(a: Arithmetic, given: dict[str, Any]) -> Value:
    return a.sub(given["other"], given["self"] if given["alpha"] == 1 else a.mul(given["self"], given["alpha"]))


def _unary(op: str) -> Compute:
    def compute(a: Arithmetic, given: dict[str, Any]) -> Value:
        return a.unary(op, given["self"])

    return compute


def _of_self(method: str) -> Compute:
    def compute(a: Arithmetic, given: dict[str, Any]) -> Value:
        return getattr(a, method)(given["self"])

    return compute


def _clamp(a: Arithmetic, given: dict[str, Any]) -> Value:
    """What is not a number stays so."""
    value = given["self"]
    low, high = given.get("min"), given.get("max")
    if low is not None:
        value = a.where(a.lt(value, low), low, value)
    return value if high is None else a.where(a.gt(value, high), high, value)


def _power(a: Arithmetic, given: dict[str, Any]) -> Value | None:
    base, exponent = given["self"], given["exponent"]
    if not isinstance(base, Value) or not isinstance(exponent, int | float) or not base.dtype.is_floating_point:
        return None  # a power of a number, or to one that is computed
    return a.power(base, float(exponent))


def _negative(a: Arithmetic, given: dict[str, Any]) -> Value:
    """A kernel's own minus sign subtracts from 0, which has no negative zero."""
    value = given["self"]
    return a.mul(value, -1.0) if value.dtype.is_floating_point else a.neg(value)


def _add_product(a: Arithmetic, given: dict[str, Any]) -> Value:
    return a.add(given["self"], a.mul(a.mul(given["tensor1"], given["tensor2"]), given["value"]))


def _softplus(a: Arithmetic, given: dict[str, Any]) -> Value:
    return a.softplus(given["self"], float(given["beta"]), float(given["threshold"]))


def _sign(a: Arithmetic, given: dict[str, Any]) -> Value:
    x = given["self"]
    return a.where(a.gt(x, 0), 1, a.where(a.lt(x, 0), -1, x))


def _not_finite_number(reader: Reader, node: Node, position: Position, guard: Guard) -> Value:
    value = reader.operand(node.args[0], node, position, guard)
    return reader.arithmetic.ne(value, value)


_COMPUTED: dict[str, Compute] = {
    **{name: _binary(name.rstrip("_")) for name in ("add", "add_", "sub", "sub_", "mul", "mul_", "div", "div_")},
    **{name: _binary(name) for name in ("maximum", "minimum")},
    **{name: _unary(name) for name in ("exp", "exp2", "log", "log2", "log1p", "sqrt", "rsqrt", "sin", "cos", "erf")},
    **{name: _unary(name) for name in ("tanh", "floor", "ceil", "abs")},
    "neg": _negative,
    **{name: _of_self(name) for name in ("sigmoid", "silu")},
    "rsub": _reversed_sub,
    "square": lambda a, given: a.mul(given["self"], given["self"]),
    "reciprocal": lambda a, given: a.div(1.0, given["self"]),
    "relu": lambda a, given: a.where(a.lt(given["self"], 0), 0, given["self"]),
    "gelu": lambda a, given: a.gelu(given["self"], given["approximate"]),
    "softplus": _softplus,
    "pow": _power,
    "clamp": _clamp,
    "clamp_min": _clamp,
    "clamp_max": _clamp,
    "hardtanh": lambda a, given: _clamp(a, {"self": given["self"], "min": given["min_val"], "max": given["max_val"]}),
    "addcmul": _add_product,
    "sign": _sign,
}
_OVERLOADS = ("Tensor", "Scalar", "default", "Tensor_Scalar")


def _overloads(name: str) -> list[Any]:
    packet = getattr(ATEN, name)
    return [getattr(packet, overload) for overload in packet.overloads() if overload in _OVERLOADS]


def _table() -> dict[Any, Rule]:
    rules: dict[Any, Rule] = {
        target: _arithmetic(compute) for name, compute in _COMPUTED.items() for target in _overloads(name)
    }
    for op in ("lt", "le", "gt", "ge", "eq", "ne"):
        rules |= {target: _comparison(op) for target in _overloads(op)}
    for op in ("and", "or", "xor", "not"):
        rules |= {target: _logical(op) for target in _overloads(f"logical_{op}")}
        rules |= {target: _bitwise(op) for target in _overloads(f"bitwise_{op}")}
    rules |= dict.fromkeys((ATEN.remainder.Scalar, ATEN.remainder.Tensor), _divided("remainder"))
    quotients = (ATEN.div.Tensor_mode, ATEN.div.Scalar_mode, ATEN.floor_divide.default, ATEN.floor_divide.Scalar)
    rules |= dict.fromkeys(quotients, _divided("floor_div"))
    casts = (ATEN._to_copy.default, ATEN.to.dtype, ATEN.clone.default, ATEN.contiguous.default)
    rules |= dict.fromkeys(casts, _cast)
    choices = ("self", "ScalarSelf", "ScalarOther", "Scalar")
    rules |= {getattr(ATEN.where, overload): _chosen for overload in choices}
    rules |= {ATEN.masked_fill.Scalar: _chosen, ATEN.masked_fill.Tensor: _chosen}
    rules[ATEN.isnan.default] = _not_finite_number
    return rules


RULES: dict[Any, Rule] = _table()
