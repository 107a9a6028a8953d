"""Rules of the operations that move elements: joins, gathers, slices put into others, tensors made from nothing."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from kimigraph.ir.pointwise.elementwise import type_of
from kimigraph.ir.pointwise.index import ZERO, Index, within
from kimigraph.ir.pointwise.reader import Reader, Rule
from kimigraph.ir.pointwise.unfusable import Unfusable
from kimigraph.ir.pointwise.values import Condition, Guard, Value
from kimigraph.ir.pointwise.views import Position, shape_of, slice_of
from kimigraph.ir.schemas import argument

ATEN = torch.ops.aten
MOST_PIECES = 16


def _holds(reader: Reader, condition: Condition) -> Value | None:
    """The condition as a truth value, None where it always holds."""
    index, low, high = condition
    found = reader.arithmetic
    parts: list[Value] = []
    if index.least < low:
        parts.append(found.compare("ge", reader.position(index, torch.int32), low))
    if index.most >= high:
        parts.append(found.lt(reader.position(index, torch.int32), high))
    if len(parts) == 2:
        return reader.values.make("and", parts, torch.bool)
    return parts[0] if parts else None


def _joined(reader: Reader, node: Node, position: Position, guard: Guard) -> Value:
    """cat and stack: of the pieces, the one in which the index lies."""
    pieces, stacked = node.args[0], node.target is ATEN.stack.default
    if not isinstance(pieces, list | tuple) or len(pieces) > MOST_PIECES:
        raise Unfusable(f"it joins more than {MOST_PIECES} tensors", node)
    rank = len(position)
    dim = int(argument(node, "dim")) % rank
    dtype = type_of(node)
    start = 0
    spans: list[tuple[int, int, Node]] = []
    for piece in pieces:
        if not isinstance(piece, Node):
            raise Unfusable("an operand is no tensor", node)
        size = 1 if stacked else shape_of(piece)[dim] if len(shape_of(piece)) == rank else 0
        spans += [(start, start + size, piece)] if size else []
        start += size
    chosen: Value | None = None
    for low, high, piece in reversed(spans):
        if position[dim].most < low or position[dim].least >= high:
            continue
        inner = (
            *position[:dim],
            *(() if stacked else (within(position[dim], -low, high - low),)),
            *position[dim + 1 :],
        )
        inside: Condition = (position[dim], low, high)
        value = reader.values.convert(reader.value(piece, inner, (*guard, inside)), dtype)
        below = None if chosen is None else _holds(reader, (position[dim], min(position[dim].least, low), high))
        chosen = value if below is None or chosen is None else reader.arithmetic.where(below, value, chosen)
    if chosen is None:
        raise Unfusable("it joins nothing", node)
    return chosen


def _padded(reader: Reader, node: Node, position: Position, guard: Guard) -> Value:
    source, pads = reader.source(node), argument(node, "pad")
    sizes = shape_of(source)
    inner, conditions = list(position), list[Condition]()
    for place in range(len(pads) // 2):
        dim = len(sizes) - 1 - place
        before = int(pads[2 * place])
        inner[dim] = within(position[dim], -before, sizes[dim])
        conditions.append((position[dim], before, before + sizes[dim]))
    value = reader.value(source, tuple(inner), (*guard, *conditions))
    filled = reader.values.constant(argument(node, "value") or 0, type_of(node))
    return _where_all(reader, conditions, value, filled)


def _where_all(reader: Reader, conditions: Sequence[Condition], value: Value, otherwise: Value) -> Value:
    for condition in conditions:
        holds = _holds(reader, condition)
        value = value if holds is None else reader.arithmetic.where(holds, value, otherwise)
    return value


def _scattered(reader: Reader, node: Node, position: Position, guard: Guard) -> Value:
    """slice_scatter and select_scatter: the source where it lies, else what was there."""
    base, source = reader.source(node), argument(node, "src")
    if not isinstance(source, Node):
        raise Unfusable("an operand is no tensor", node)
    sizes, dtype = shape_of(base), type_of(node)
    if node.target is ATEN.select_scatter.default:
        dim = int(argument(node, "dim")) % len(sizes)
        start = int(argument(node, "index")) % sizes[dim]
        inner, inside = (*position[:dim], *position[dim + 1 :]), (position[dim], start, start + 1)
    else:
        dim, start, step = slice_of(node, sizes)
        if step != 1:
            raise Unfusable("it puts a tensor in with steps", node)
        size = shape_of(source)[dim]
        inner = (*position[:dim], within(position[dim], -start, size), *position[dim + 1 :])
        inside = (position[dim], start, start + size)
    before = reader.values.convert(reader.value(base, position, guard), dtype)
    value = reader.values.convert(reader.value(source, inner, (*guard, inside)), dtype)
    return _where_all(reader, [inside], value, before)


def _gathered(reader: Reader, node: Node, position: Position, guard: Guard) -> Value:
    source, index = reader.source(node), argument(node, "index")
    sizes = shape_of(source)
    if not sizes:
        raise Unfusable("it gathers from a single element", node)
    dim = int(argument(node, "dim")) % len(sizes)
    found, inside = reader.fetched(index, position, guard, sizes[dim], wraps=False)
    return reader.value(source, (*position[:dim], found, *position[dim + 1 :]), (*guard, *inside))


def _rows(reader: Reader, node: Node, position: Position, guard: Guard) -> Value:
    """index_select and embedding."""
    embedding = node.target is ATEN.embedding.default
    source = node.args[0]
    index: Any = argument(node, "indices") if embedding else argument(node, "index")
    if not isinstance(source, Node) or not isinstance(index, Node):
        raise Unfusable("an operand is no tensor", node)
    sizes = shape_of(source)
    rank = len(shape_of(index))
    dim = 0 if embedding else int(argument(node, "dim")) % len(sizes)
    where = position[dim : dim + rank] if rank else ()
    found, inside = reader.fetched(index, where, guard, sizes[dim], wraps=False)
    return reader.value(source, (*position[:dim], found, *position[dim + rank :]), (*guard, *inside))


def _indexed(reader: Reader, node: Node, position: Position, guard: Guard) -> Value:
    """index.Tensor with index tensors that stand side by side."""
    source, given = reader.source(node), node.args[1]
    sizes = shape_of(source)
    assert isinstance(given, list | tuple)
    dims = [dim for dim, index in enumerate(given) if index is not None]
    indices = [index for index in given if isinstance(index, Node)]
    if len(indices) != len(dims) or not dims or dims != list(range(dims[0], dims[-1] + 1)):
        raise Unfusable("its indices do not stand side by side", node)
    rank = len(torch.broadcast_shapes(*(shape_of(index) for index in indices)))
    first = dims[0]
    inner: list[Index] = list(position[:first])
    conditions: list[Condition] = []
    for dim, index in zip(dims, indices, strict=True):
        own = shape_of(index)
        where = position[first + rank - len(own) : first + rank]
        where = tuple(ZERO if size == 1 else at for at, size in zip(where, own, strict=True))
        found, inside = reader.fetched(index, where, guard, sizes[dim], wraps=True)
        inner.append(found)
        conditions += inside
    inner += position[first + rank :]
    return reader.value(source, tuple(inner), (*guard, *conditions))


def _filled(reader: Reader, node: Node, position: Position, guard: Guard) -> Value:
    del position, guard
    name = str(node.target).split(".")[1]
    number: Any = (
        0 if "zeros" in name else 1 if "ones" in name else argument(node, "s" if "scalar" in name else "fill_value")
    )
    if not isinstance(number, int | float):
        raise Unfusable("it is filled with a computed number", node)
    return reader.values.constant(number, type_of(node))


def _counted(reader: Reader, node: Node, position: Position, guard: Guard) -> Value:
    """arange of whole numbers."""
    del guard
    names = {"default": ("end",), "start": ("start", "end"), "start_step": ("start", "end", "step")}
    given = {name: argument(node, name) for name in names[str(node.target).rpartition(".")[2]]}
    if any(not isinstance(value, int) for value in given.values()) or type_of(node).is_floating_point:
        raise Unfusable("it counts in fractions", node)
    index = position[0] * int(given.get("step", 1)) + int(given.get("start", 0))
    return reader.position(index, type_of(node))


RULES: dict[Any, Rule] = {
    ATEN.cat.default: _joined,
    ATEN.stack.default: _joined,
    ATEN.constant_pad_nd.default: _padded,
    ATEN.slice_scatter.default: _scattered,
    ATEN.select_scatter.default: _scattered,
    ATEN.gather.default: _gathered,
    ATEN.index_select.default: _rows,
    ATEN.embedding.default: _rows,
    ATEN.index.Tensor: _indexed,
    **{
        getattr(getattr(ATEN, name), overload): _filled
        for name, overload in (
            *(("full", "default"), ("zeros", "default"), ("ones", "default"), ("scalar_tensor", "default")),
            *((f"{name}_like", "default") for name in ("full", "zeros", "ones")),
            *((f"new_{name}", "default") for name in ("full", "zeros", "ones")),
        )
    },
    **{getattr(ATEN.arange, overload): _counted for overload in ("default", "start", "start_step")},
}
