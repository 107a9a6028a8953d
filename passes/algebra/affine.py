"""Integer expressions of a graph as a known tensor plus symbols, each symbol read through views.

The known part is computed: masks are built from aranges and constants, which are small before they are broadcast.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from kimigraph.passes.algebra.layout import peel, replay
from kimigraph.passes.algebra.nodes import argument, constant, dtype, packet, shape
from kimigraph.passes.algebra.refusal import Refused

INTEGERS = (torch.int64, torch.int32)
INDEX_LIMIT = 1 << 22
"""Larger known tensors are not computed: a mask expression stays far below."""


@dataclass(frozen=True)
class Symbol:
    """An integer tensor of the graph inside an expression.

    ``elements`` has the expression's shape and says which element of ``node`` stands where; ``reader`` is the node that
    reads ``node``, so that its value is the one of that moment.
    """

    node: Node
    coefficient: int
    elements: Tensor
    reader: Node


@dataclass(frozen=True)
class Affine:
    """``known`` + sum of coefficient * symbol, element by element."""

    known: Tensor
    symbols: tuple[Symbol, ...] = ()

    def mapped(self, change: Callable[[Tensor], Tensor]) -> "Affine":
        """The expression seen through a view that ``change`` applies to its tensors."""
        symbols = tuple(replace(symbol, elements=change(symbol.elements)) for symbol in self.symbols)
        return Affine(change(self.known), symbols)

    def plus(self, other: "Affine", sign: int) -> "Affine":
        """Sum or difference, broadcast; equal symbols are joined and vanish at coefficient 0."""
        known = self.known + sign * other.known
        left = [replace(s, elements=s.elements.broadcast_to(known.shape)) for s in self.symbols]
        for symbol in other.symbols:
            term = replace(
                symbol, coefficient=sign * symbol.coefficient, elements=symbol.elements.broadcast_to(known.shape)
            )
            same = [s for s in left if s.node is term.node and torch.equal(s.elements, term.elements)]
            if same:
                left.remove(same[0])
                term = replace(same[0], coefficient=same[0].coefficient + term.coefficient)
            if term.coefficient:
                left.append(term)
        return Affine(known, tuple(left))


def affine(value: Any, reader: Node) -> Affine:
    """The affine form of a number or an integer node that ``reader`` uses. Refused when it has none."""
    if isinstance(value, int) and not isinstance(value, bool):
        return Affine(torch.tensor(value))
    if not isinstance(value, Node) or dtype(value) not in INTEGERS:
        raise Refused(f"{value} is no integer expression", reader)
    base, chain = peel(value)
    readers = [node for node in chain if node.target is not None and _copies(node)]
    form = _form(base, readers[0] if readers else reader)
    try:
        return form.mapped(lambda tensor: replay(chain, tensor))
    except (RuntimeError, IndexError, TypeError) as error:
        raise Refused("its views cannot be followed", value) from error


def _copies(node: Node) -> bool:
    return packet(node) in ("clone", "contiguous", "_to_copy", "to")


def _form(node: Node, reader: Node) -> Affine:
    name = packet(node)
    filled = constant(node)
    if filled is not None and isinstance(filled, int):
        return Affine(torch.tensor(int(filled)).expand(shape(node)))
    if name == "arange":
        return Affine(_arange(node))
    if name in ("add", "sub") and argument(node, "alpha", 1) == 1:
        _require_small(node)
        left, right = affine(node.args[0], node), affine(node.args[1], node)
        return left.plus(right, 1 if name == "add" else -1)
    if name == "index":
        table, indices = node.args[0], argument(node, "indices")
        if isinstance(table, Node) and isinstance(indices, list | tuple) and len(indices) == 1:
            return _looked_up(affine(table, node), affine(indices[0], node), node)
    _require_small(node)
    elements = torch.arange(torch.Size(shape(node)).numel()).view(shape(node))
    return Affine(torch.tensor(0).expand(shape(node)), (Symbol(node, 1, elements, reader),))


def _require_small(node: Node) -> None:
    """Refuse a tensor too large to be computed here, such as a whole mask spelled as a difference of positions."""
    if torch.Size(shape(node)).numel() > INDEX_LIMIT:
        raise Refused("it is too large to be followed", node)


def _looked_up(table: Affine, index: Affine, node: Node) -> Affine:
    if table.symbols or index.symbols or table.known.dim() != 1:
        raise Refused("it reads a table that is not known", node)
    return Affine(table.known[index.known])


def _arange(node: Node) -> Tensor:
    bounds = [value for value in node.args if isinstance(value, int)]
    if len(bounds) != len(node.args):
        raise Refused("it counts to a computed bound", node)
    _require_small(node)
    start, end, step = {1: (0, *bounds, 1), 2: (*bounds, 1), 3: tuple(bounds)}[len(bounds)]
    return torch.arange(start, end, step)
