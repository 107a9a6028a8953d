"""Rules of products of few rows with a weight: each element is a reduction of its own along the weight's depth.

Such a product is bound by the bytes of its weight, so what is done to its rows before and to its columns after costs
next to nothing in the same kernel. Several products may have different depths: each depth is a variable of its own.
"""

from functools import reduce
from typing import Any

import torch
from torch.fx import Node

from kimigraph.ir.operators import OPERATORS
from kimigraph.ir.pointwise.elementwise import type_of
from kimigraph.ir.pointwise.index import ZERO, Index, of, unflattened
from kimigraph.ir.pointwise.reader import Reader, Rule
from kimigraph.ir.pointwise.unfusable import Unfusable
from kimigraph.ir.pointwise.values import PRODUCT, Guard, Value, is_column
from kimigraph.ir.pointwise.views import Position, shape_of
from kimigraph.ir.schemas import argument, bind

ATEN = torch.ops.aten
MOST_LINES = 8
"""More rows are the matrix units' business, and a library's."""

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def is_product(node: Node) -> bool:
    """Whether there is a rule for the product; a particular call may still be refused."""
    return node.op == "call_function" and node.target in PRODUCTS


def is_preparation(node: Node) -> bool:
    """Whether it prepares rows, and has a rule for that use alone."""
    return node.op == "call_function" and node.target in PREPARATIONS


def lines_of(node: Node) -> int:
    """How many rows a product has."""
    shape = shape_of(_rows_of(node))
    if has_own_rows(node):
        return shape[1]
    return max(torch.Size(shape[:-1]).numel(), 1)


def _rows_of(node: Node) -> Node:
    rows: Any = node.args[1] if node.target is ATEN.addmm.default else node.args[0]
    if not isinstance(rows, Node):
        raise Unfusable("an operand is no tensor", node)
    return rows


def has_own_rows(node: Node) -> bool:
    """Whether it is several products side by side, each of rows of its own."""
    return node.target is ATEN.bmm.default


def _linear(reader: Reader, node: Node, position: Position, guard: Guard) -> Value:
    source, weight, bias = reader.source(node), argument(node, "weight"), argument(node, "bias")
    *lead, column = position
    total = _product(reader, node, (source, (*lead, None)), (weight, (column, None)), guard)
    if isinstance(bias, Node):
        total = reader.arithmetic.add(total, reader.values.convert(reader.value(bias, (column,), guard), torch.float32))
    return reader.values.convert(total, type_of(node), node)


def _matrices(reader: Reader, node: Node, position: Position, guard: Guard) -> Value:
    """mm and bmm."""
    source, other = reader.source(node), node.args[1]
    *lead, row, column = position
    total = _product(reader, node, (source, (*lead, row, None)), (other, (*lead, None, column)), guard)
    return reader.values.convert(total, type_of(node), node)


def _added(reader: Reader, node: Node, position: Position, guard: Guard) -> Value:
    """addmm."""
    given = bind(node)
    if (given["alpha"], given["beta"]) != (1, 1):
        raise Unfusable("a product with a factor has no kernel", node)
    row, column = position
    total = _product(reader, node, (_rows_of(node), (row, None)), (given["mat2"], (None, column)), guard)
    bias = reader.values.convert(reader.operand(given["self"], node, position, guard), torch.float32)
    return reader.values.convert(reader.arithmetic.add(total, bias), type_of(node), node)


def _product(reader: Reader, node: Node, left: tuple[Node, Any], right: tuple[Any, Any], guard: Guard) -> Value:
    """The sum of products along the depth, which stands as None in both places."""
    (source, place), (weight, other) = left, right
    if not isinstance(weight, Node) or {type_of(source), type_of(weight), type_of(node)} - {*_FLOATS}:
        raise Unfusable("a product of these types has no kernel", node)
    depth = shape_of(source)[-1]
    fixed = [index for index in (*place, *other) if index is not None] + [index for index, _, _ in guard]
    if any(is_column(axis) for index in fixed for axis in reader.axes(index)):
        raise Unfusable("a product would be needed at every element of another reduction", node)
    along = reader.column(node, depth)
    step = of(along)
    x = reader.value(source, tuple(step if index is None else index for index in place), guard)
    w = reader.value(weight, tuple(step if index is None else index for index in other), guard)
    if step == ZERO or along.name not in x.axes & w.axes:
        raise Unfusable("its depth is no loop", node)
    # Elements that a narrow type holds are held as fp32 numbers already.
    wide = [reader.values.convert(value, torch.float32) for value in (x, w)]
    total = reader.values.make(PRODUCT, wide, torch.float32, along, node)
    if any(map(is_column, total.axes)):
        raise Unfusable("a product would be needed at every element of another reduction", node)
    return total


def _mixed(reader: Reader, node: Node, position: Position, guard: Guard) -> Value:
    """attention_residual: a softmax over the sources, whose weighted sum has a norm of its own."""
    given = bind(node)
    found, sources = reader.arithmetic, given["sources"]
    width = shape_of(sources[0])[-1]
    *lead, last = position
    if any(is_column(axis) for index in lead for axis in reader.axes(index)):
        raise Unfusable("a reduction would be needed at every element of another", node)
    along = reader.column(node, width)

    def read(source: Node, at: Index) -> Value:
        return reader.values.convert(reader.value(source, (*lead, at), guard), torch.float32)

    def weight(name: str, at: Index) -> Value:
        return reader.values.convert(
            reader.value(given[name], unflattened(at, shape_of(given[name])), guard), torch.float32
        )

    def total(value: Value) -> Value:
        return reader.values.make("sum", (value,), torch.float32, along, node)

    def root(value: Value, eps: float) -> Value:
        squares = total(found.mul(value, value))
        return found.unary("rsqrt", found.add(found.div(squares, float(width)), eps))

    step = of(along)
    effective = weight("query", step)
    if given["norm_weight"] is not None:
        effective = found.mul(effective, weight("norm_weight", step))
    rows = [read(source, step) for source in sources]
    logits = [found.mul(total(found.mul(row, effective)), root(row, given["eps"])) for row in rows]
    peak = reduce(found.maximum, logits)
    raised = [found.unary("exp", found.sub(logit, peak)) for logit in logits]
    whole = reduce(found.add, raised)
    shares = [found.ratio(value, whole) for value in raised]

    def mixed(at: Index) -> Value:
        return reduce(found.add, [found.mul(a, read(source, at)) for a, source in zip(shares, sources, strict=True)])

    value = mixed(last)
    if given["out_norm_weight"] is not None:
        value = found.mul(found.mul(value, root(mixed(step), given["out_eps"])), weight("out_norm_weight", last))
    return reader.values.convert(value, type_of(node), node)


PRODUCTS: dict[Any, Rule] = {
    ATEN.linear.default: _linear,
    ATEN.mm.default: _matrices,
    ATEN.bmm.default: _matrices,
    ATEN.addmm.default: _added,
}
PREPARATIONS: dict[Any, Rule] = {OPERATORS["attention_residual"].overload: _mixed}
"""What prepares rows of products, and by itself has a kernel that is made for it."""

RULES: dict[Any, Rule] = {**PRODUCTS, **PREPARATIONS}
