"""Products of the same few rows with several weights, which one kernel can compute, read from a graph."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any

import torch
from torch.fx import GraphModule, Node

MOST_ROWS = 8
"""More rows are the matrix units' business, and a library's."""

MOST_WIDE_COLUMNS = 512
"""Columns of a 32-bit weight with several rows: each is one program, which reads all rows."""

_ATEN = torch.ops.aten
_ROW_VIEWS = frozenset((_ATEN.view.default, _ATEN.reshape.default, _ATEN.unsqueeze.default, _ATEN.squeeze.dim))
_CASTS = frozenset((_ATEN._to_copy.default, _ATEN.to.dtype))
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class RowProduct:
    """``node`` = the rows of ``source`` (a placeholder) times the transpose of ``weight`` [columns, depth]."""

    node: Node
    source: Node
    weight: Node
    rows: int
    row_stride: int
    columns: int
    depth: int

    @property
    def narrow(self) -> bool:
        """Whether the matrix units take its operands as they are: 16-bit rows and weight."""
        types = {self.source.meta["val"].dtype, self.weight.meta["val"].dtype}
        return len(types) == 1 and types <= {torch.bfloat16, torch.float16}


def row_products(child: GraphModule) -> list[RowProduct] | None:
    """The products of a region, in order; None when it holds anything else than products of the same rows.

    Rows may be cast to a wider type and regrouped on the way. All results leave the region.
    """
    nodes = [node for node in child.graph.nodes if node.op not in ("placeholder", "output")]
    found: list[RowProduct] = []
    for node in nodes:
        if node.target is _ATEN.linear.default:
            product = row_product(node)
            if product is None or product.source.op != "placeholder" or product.weight.op != "placeholder":
                return None
            found.append(product)
        elif node.target not in _ROW_VIEWS and not is_widening(node):
            return None
    results: Any = next(iter(reversed(child.graph.nodes))).args[0]
    outputs = {results} if isinstance(results, Node) else set(results)
    if not found or outputs != {product.node for product in found}:
        return None
    return found if len({product.source for product in found}) == 1 else None


def row_product(node: Node) -> RowProduct | None:
    """The product that ``node`` is, its rows followed through views and widening casts; None if no kernel has it."""
    left, weight = node.args[0], node.args[1]
    if len(node.args) > 2 or node.kwargs or not isinstance(left, Node) or not isinstance(weight, Node):
        return None
    source = source_of(left)
    value, matrix = source.meta["val"], weight.meta["val"]
    depth = matrix.shape[-1]
    strides = _row_strides(value)
    rows = prod(value.shape[:-1])
    types = (value.dtype, matrix.dtype, node.meta["val"].dtype)
    if matrix.dim() != 2 or not matrix.is_contiguous() or strides is None or not 1 <= rows <= MOST_ROWS:
        return None
    if any(dtype not in _FLOATS for dtype in types) or left.meta["val"].dtype != matrix.dtype:
        return None
    product = RowProduct(node, source, weight, rows, strides, matrix.shape[0], depth)
    return product if product.narrow or rows == 1 or product.columns <= MOST_WIDE_COLUMNS else None


def source_of(left: Node) -> Node:
    """The tensor whose rows these are: behind views that regroup rows and casts to a wider type."""
    while left.op == "call_function" and isinstance(left.args[0], Node):
        before, after = left.args[0].meta["val"], left.meta["val"]
        same_rows = before.dim() > 0 and before.shape[-1] == after.shape[-1] and before.numel() == after.numel()
        if not same_rows or not (left.target in _ROW_VIEWS or is_widening(left)):
            break
        left = left.args[0]
    return left


def is_cast_alone(node: Node) -> bool:
    """Whether the node only changes the type of its operand."""
    if node.target not in _CASTS or not isinstance(node.args[0], Node):
        return False
    named: Mapping[str, Any] = node.kwargs
    return all(name == "dtype" or given is None for name, given in named.items())


def is_widening(node: Node) -> bool:
    """Whether the node only casts to a type that holds every value of the old one."""
    if not is_cast_alone(node):
        return False
    source: Any = node.args[0]
    before, after = source.meta["val"].dtype, node.meta["val"].dtype
    return before == after or (before in (torch.bfloat16, torch.float16) and after == torch.float32)


def _row_strides(value: torch.Tensor) -> int | None:
    """Elements from one row to the next, when all rows are equally far apart and each lies in one piece."""
    if value.dim() < 1 or value.stride(-1) != 1:
        return None
    steps = [(size, step) for size, step in zip(value.shape[:-1], value.stride()[:-1], strict=True) if size > 1]
    for (_, outer), (size, inner) in pairwise(steps):
        if outer != size * inner:
            return None
    return steps[-1][1] if steps else value.shape[-1]
