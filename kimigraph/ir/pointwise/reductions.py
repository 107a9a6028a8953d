"""Rules of the operations that reduce: sums, extremes, norms, softmax. All of a region run over one extent."""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch.fx import Node

from kimigraph.ir.operators import OPERATORS
from kimigraph.ir.pointwise.arithmetic import held
from kimigraph.ir.pointwise.elementwise import type_of
from kimigraph.ir.pointwise.index import ZERO
from kimigraph.ir.pointwise.reader import Reader, Rule
from kimigraph.ir.pointwise.unfusable import Unfusable
from kimigraph.ir.pointwise.values import Guard, Value
from kimigraph.ir.pointwise.views import Position, shape_of
from kimigraph.ir.schemas import argument

ATEN = torch.ops.aten


def reduced_dims(node: Node) -> tuple[int, ...] | None:
    """The dims of the first operand over which the node reduces, ascending; None when it is no reduction."""
    if node.target not in RULES:
        return None
    source = Reader.source(node)
    rank = len(shape_of(source))
    if node.target is ATEN.layer_norm.default:
        return tuple(range(rank - len(argument(node, "normalized_shape")), rank))
    if node.target in _NORMS:
        return (rank - 1,)
    given: Any = argument(node, "dim") if _takes_dims(node) else None
    dims = [given] if isinstance(given, int) else list(given or range(rank))
    return tuple(sorted({int(dim) % max(rank, 1) for dim in dims}))


def _takes_dims(node: Node) -> bool:
    schema: Any = getattr(node.target, "_schema", None)
    return any(declared.name == "dim" for declared in schema.arguments)


def _dims(node: Node) -> tuple[int, ...]:
    dims = reduced_dims(node)
    assert dims is not None
    return dims


def _inner(node: Node, position: Position) -> Position:
    """A position of the operand's rank; what stands at the reduced dims does not matter."""
    dims, rank = _dims(node), len(shape_of(Reader.source(node)))
    if len(position) == rank:
        return position
    kept = iter(position)
    return tuple(ZERO if dim in dims else next(kept) for dim in range(rank))


def _read(reader: Reader, node: Node, guard: Guard, dtype: torch.dtype) -> Callable[[Position], Value]:
    source = reader.source(node)
    return lambda at: reader.values.convert(reader.value(source, at, guard), dtype)


def _summed(
    finish: Callable[[Reader, Value, int], Value], prepare: Callable[[Reader, Value], Value] | None = None
) -> Rule:
    """A sum in the held type of the result; ``prepare`` each element, ``finish`` with the count of elements."""

    def rule(reader: Reader, node: Node, position: Position, guard: Guard) -> Value:
        dtype = type_of(node)
        if dtype is torch.bool:
            raise Unfusable("arithmetic on truth values has no kernel", node)
        dims = _dims(node)
        read = _read(reader, node, guard, _summed_type(node, dtype))

        def body(at: Position) -> Value:
            return read(at) if prepare is None else prepare(reader, read(at))

        count = prod(shape_of(reader.source(node))[dim] for dim in dims)
        total = reader.reduced(node, "sum", dims, _inner(node, position), guard, body)
        return reader.values.convert(finish(reader, total, count), dtype, node)

    return rule


def _summed_type(node: Node, dtype: torch.dtype) -> torch.dtype:
    source = type_of(Reader.source(node))
    return source if dtype.is_floating_point and source.is_floating_point else held(dtype)


def _norm2(reader: Reader, node: Node, position: Position, guard: Guard) -> Value:
    if argument(node, "ord") != 2:
        raise Unfusable("only the norm of order 2 has a kernel", node)
    return _ROOT_OF_SQUARES(reader, node, position, guard)


_ROOT_OF_SQUARES = _summed(
    lambda reader, total, count: reader.arithmetic.unary("sqrt", total),
    lambda reader, value: reader.arithmetic.mul(value, value),
)


def _extreme(kind: str) -> Rule:
    """amax and amin: not a number where one of the elements is none."""

    def rule(reader: Reader, node: Node, position: Position, guard: Guard) -> Value:
        dtype, dims, at = type_of(node), _dims(node), _inner(node, position)
        if dtype is torch.bool:
            raise Unfusable("arithmetic on truth values has no kernel", node)
        read, found = _read(reader, node, guard, dtype), reader.arithmetic
        value = reader.reduced(node, kind, dims, at, guard, read)
        if not dtype.is_floating_point:
            return value

        def strange(place: Position) -> Value:
            return reader.values.convert(found.ne(read(place), read(place)), torch.int32)

        spoiled = found.gt(reader.reduced(node, "sum", dims, at, guard, strange), 0)
        return reader.values.convert(found.where(spoiled, float("nan"), value), dtype, node)

    return rule


def _truth(kind: str) -> Rule:
    """any and all."""

    def rule(reader: Reader, node: Node, position: Position, guard: Guard) -> Value:
        if type_of(node) is not torch.bool:
            raise Unfusable("its element type has no kernel", node)
        read = _read(reader, node, guard, torch.bool)

        def body(at: Position) -> Value:
            return reader.values.convert(read(at), torch.int32)

        value = reader.reduced(node, kind, _dims(node), _inner(node, position), guard, body)
        return reader.values.convert(value, torch.bool)

    return rule


def _softmax(reader: Reader, node: Node, position: Position, guard: Guard) -> Value:
    dtype, dims, found = type_of(node), _dims(node), reader.arithmetic
    # With a type argument eager converts first; the half-to-float form widens. Both end in reading in fp32.
    narrow = argument(node, "dtype") if _has(node, "dtype") else None
    read = _read(reader, node, guard, narrow or type_of(reader.source(node)))
    peak = reader.reduced(node, "max", dims, position, guard, read)

    def shifted(at: Position) -> Value:
        return found.sub(read(at), peak)

    def raised(at: Position) -> Value:
        return found.unary("exp", shifted(at))

    total = reader.reduced(node, "sum", dims, position, guard, raised)
    if "log_softmax" in str(node.target):
        value = found.sub(shifted(position), found.unary("log", total))
    else:
        value = found.ratio(raised(position), total)
    return reader.values.convert(value, dtype, node)


def _has(node: Node, name: str) -> bool:
    schema: Any = getattr(node.target, "_schema", None)
    return any(declared.name == name for declared in schema.arguments)


def _layer_norm(reader: Reader, node: Node, position: Position, guard: Guard) -> Value:
    dims, found = _dims(node), reader.arithmetic
    count = prod(shape_of(reader.source(node))[dim] for dim in dims)
    read = _read(reader, node, guard, type_of(reader.source(node)))
    mean = found.div(reader.reduced(node, "sum", dims, position, guard, read), float(count))

    def centred(at: Position) -> Value:
        return found.sub(read(at), mean)

    def squared(at: Position) -> Value:
        return found.mul(centred(at), centred(at))

    variance = found.div(reader.reduced(node, "sum", dims, position, guard, squared), float(count))
    root = found.unary("rsqrt", found.add(variance, float(argument(node, "eps"))))
    value = found.mul(centred(position), root)
    inner = position[dims[0] :]
    weight, bias = argument(node, "weight"), argument(node, "bias")
    if isinstance(weight, Node):
        value = found.mul(value, _wide(reader, weight, inner, guard))
    if isinstance(bias, Node):
        value = found.add(value, _wide(reader, bias, inner, guard))
    return reader.values.convert(value, type_of(node), node)


def _rms_norm(reader: Reader, node: Node, position: Position, guard: Guard) -> Value:
    dims, found, dtype = _dims(node), reader.arithmetic, type_of(node)
    source, residual = reader.source(node), argument(node, "residual")

    def read(at: Position) -> Value:
        value = reader.value(source, at, guard)
        if isinstance(residual, Node):
            value = reader.values.convert(found.add(value, reader.value(residual, at, guard)), dtype, node)
        return value

    def squared(at: Position) -> Value:
        return found.mul(read(at), read(at))

    count = shape_of(source)[-1]
    mean = found.div(reader.reduced(node, "sum", dims, position, guard, squared), float(count))
    root = found.unary("rsqrt", found.add(mean, float(argument(node, "eps"))))
    value = found.mul(read(position), root)
    if argument(node, "rounds_first"):
        value = reader.values.convert(value, dtype, node)
    weight = argument(node, "weight")
    if isinstance(weight, Node):
        value = found.mul(value, _wide(reader, weight, position[-1:], guard))
    return reader.values.convert(value, dtype, node)


def _wide(reader: Reader, given: Node, position: Sequence[Any], guard: Guard) -> Value:
    return reader.values.convert(reader.value(given, tuple(position), guard), torch.float32)


RULES: dict[Any, Rule] = {
    **dict.fromkeys((ATEN.sum.dim_IntList, ATEN.sum.default), _summed(lambda reader, total, count: total)),
    **dict.fromkeys(
        (ATEN.mean.dim, ATEN.mean.default),
        _summed(lambda reader, total, count: reader.arithmetic.div(total, float(count))),
    ),
    ATEN.linalg_vector_norm.default: _norm2,
    ATEN.amax.default: _extreme("max"),
    ATEN.amin.default: _extreme("min"),
    **dict.fromkeys((ATEN.any.dim, ATEN.any.default), _truth("max")),
    **dict.fromkeys((ATEN.all.dim, ATEN.all.default), _truth("min")),
    **{
        getattr(getattr(ATEN, name), overload): _softmax
        for name, overload in (
            *(("softmax", "int"), ("_softmax", "default")),
            *(("log_softmax", "int"), ("_log_softmax", "default")),
        )
    },
    ATEN.layer_norm.default: _layer_norm,
    OPERATORS["rms_norm"].overload: _rms_norm,
}
_NORMS = frozenset((OPERATORS["rms_norm"].overload,))
