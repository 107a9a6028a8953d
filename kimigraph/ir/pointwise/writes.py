"""Rules of the operations that write a tensor from outside: whole tensors, and rows at computed places."""

from typing import Any

import torch
from torch.fx import Node

from kimigraph.ir.pointwise.elementwise import type_of
from kimigraph.ir.pointwise.index import ZERO, Index
from kimigraph.ir.pointwise.reader import Reader, Rule
from kimigraph.ir.pointwise.unfusable import Unfusable
from kimigraph.ir.pointwise.values import Condition, Guard, Value, fetched_by, simple_guard
from kimigraph.ir.pointwise.views import Position, shape_of
from kimigraph.ir.schemas import argument

ATEN = torch.ops.aten


def shape_of_sink(node: Node) -> tuple[int, ...]:
    """The shape of what one call stores: its result's, or that of the rows that it puts somewhere."""
    if node.target is not ATEN.index_put_.default:
        return shape_of(node)
    target, dims, indices = _put(node)
    places = torch.broadcast_shapes(*(shape_of(index) for index in indices))
    sizes = shape_of(target)
    return (*sizes[: dims[0]], *places, *sizes[dims[-1] + 1 :])


def written(reader: Reader, node: Node, position: Position) -> tuple[Node, Index, Guard, Value]:
    """The tensor that a write changes, where in it the element at ``position`` goes, if where, and its value."""
    target = node.args[0]
    assert isinstance(target, Node)
    if node.target is ATEN.index_put_.default:
        return _row_written(reader, node, position)
    address = ZERO
    for index, step in zip(position, target.meta["val"].stride(), strict=True):
        address = address + index * int(step)
    return target, address, (), reader.value(node, position)


def fetched_by_store(address: Index, guard: Guard) -> list[Value]:
    """The elements of index tensors that decide where something is stored."""
    return [*fetched_by(address), *(value for index, _, _ in guard for value in fetched_by(index))]


def _put(node: Node) -> tuple[Node, list[int], list[Node]]:
    target, given = node.args[0], node.args[1]
    assert isinstance(target, Node) and isinstance(given, list | tuple)
    dims = [dim for dim, index in enumerate(given) if index is not None]
    indices = [index for index in given if isinstance(index, Node)]
    if argument(node, "accumulate") or not dims or len(dims) != len(indices):
        raise Unfusable("it adds to what several places hold", node)
    if dims != list(range(dims[0], dims[-1] + 1)):
        raise Unfusable("its indices do not stand side by side", node)
    return target, dims, indices


def _row_written(reader: Reader, node: Node, position: Position) -> tuple[Node, Index, Guard, Value]:
    target, dims, indices = _put(node)
    sizes, first = shape_of(target), dims[0]
    rank = len(torch.broadcast_shapes(*(shape_of(index) for index in indices)))
    places: list[Index] = list(position[:first])
    conditions: list[Condition] = []
    for dim, index in zip(dims, indices, strict=True):
        own = shape_of(index)
        at = position[first + rank - len(own) : first + rank]
        at = tuple(ZERO if size == 1 else where for where, size in zip(at, own, strict=True))
        found, inside = reader.fetched(index, at, (), sizes[dim], wraps=True)
        places.append(found)
        conditions += inside
    places += position[first + rank :]
    address = ZERO
    for index, step in zip(places, target.meta["val"].stride(), strict=True):
        address = address + index * int(step)
    guard = simple_guard(conditions)
    value = reader.values.convert(reader.operand(node.args[2], node, position, ()), type_of(node), node)
    return target, address, () if guard is None else guard, value


def _copied(reader: Reader, node: Node, position: Position, guard: Guard) -> Value:
    return reader.values.convert(reader.operand(node.args[1], node, position, guard), type_of(node), node)


def _filled(reader: Reader, node: Node, position: Position, guard: Guard) -> Value:
    del position, guard
    number: Any = 0 if node.target is ATEN.zero_.default else node.args[1]
    if not isinstance(number, int | float):
        raise Unfusable("it is filled with a computed number", node)
    return reader.values.constant(number, type_of(node))


def _no_value(reader: Reader, node: Node, position: Position, guard: Guard) -> Value:
    del reader, position, guard
    raise Unfusable("what is written is read in another way", node)


RULES: dict[Any, Rule] = {
    ATEN.copy_.default: _copied,
    ATEN.fill_.Scalar: _filled,
    ATEN.zero_.default: _filled,
    ATEN.index_put_.default: _no_value,
}
