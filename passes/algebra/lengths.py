"""Masks that are a length: row s of a sequence sees the first ``length + s`` keys."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import Graph, Node

from kimigraph.ir import purity
from kimigraph.passes.algebra.affine import Affine, affine
from kimigraph.passes.algebra.layout import Broadcast, replay
from kimigraph.passes.algebra.masks import Atom
from kimigraph.passes.algebra.nodes import packet, shape
from kimigraph.passes.algebra.refusal import Refused
from kimigraph.passes.algebra.rewrite import call

ATEN = torch.ops.aten


@dataclass(frozen=True)
class Length:
    """``symbol + offset`` keys are visible to row 0, one more to each next row; without a symbol ``offset`` alone.

    ``symbol`` has one element, or one per sequence; its value is the one that ``reader`` sees.
    """

    offset: int
    symbol: Node | None
    reader: Node

    def same_as(self, other: "Length", graph: Graph) -> bool:
        """Whether both are the same number at run time: nothing writes the symbol between their readers."""
        if self.offset != other.offset or self.symbol is not other.symbol:
            return False
        if self.symbol is None or self.reader is other.reader:
            return True
        first, last = (self, other) if self.reader < other.reader else (other, self)
        return purity.mutation_between(graph, self.symbol, first.reader, last.reader) is None


def length_of_mask(atom: Atom, place: Callable[[Tensor], Tensor], want: tuple[int, int, int]) -> Length:
    """The length that a comparison stands for, as a mask ``want`` = [B, S, T]; ``place`` takes the mask's tensor there.

    Refused when it is none.
    """
    low, high, strict = _ordered(atom.node)
    result = Broadcast(shape(atom.node))

    def seen(tensor: Tensor) -> Tensor:
        return place(replay((result, *atom.chain), tensor)).broadcast_to(want)

    try:
        left, right = affine(low, atom.node).mapped(seen), affine(high, atom.node).mapped(seen)
    except (RuntimeError, IndexError, TypeError) as error:
        raise Refused("the positions behind the mask cannot be followed", atom.node) from error
    if left.symbols:
        raise Refused("the smaller side of the mask is not a key position", atom.node)
    start = _start(left.known, dim=2, what="keys", node=atom.node)
    rows = _start(right.known, dim=1, what="rows", node=atom.node)
    symbol, reader = _one_symbol(right, want[0], atom.node)
    return Length(rows - start + (0 if strict else 1), symbol, reader)


def _ordered(node: Node) -> tuple[object, object, bool]:
    """(smaller, larger, strictly) of a comparison."""
    name = packet(node)
    if name in ("le", "lt"):
        return node.args[0], node.args[1], name == "lt"
    if name in ("ge", "gt"):
        return node.args[1], node.args[0], name == "gt"
    raise Refused("the mask is no comparison of positions", node)


def _start(known: Tensor, dim: int, what: str, node: Node) -> int:
    """The start of a tensor that counts up by one along ``dim`` and does not vary otherwise."""
    line = _line(known, dim)
    if line is None or not torch.equal(line, line[0] + torch.arange(line.numel())):
        raise Refused(f"the mask does not count {what} one by one", node)
    return int(line[0])


def _line(known: Tensor, dim: int) -> Tensor | None:
    """The values along ``dim``, or None when the tensor varies along another dim."""
    for other in range(known.dim()):
        if other != dim and known.shape[other] > 1 and known.stride(other) != 0:
            if not bool((known == known.narrow(other, 0, 1)).all()):
                return None
        if other != dim:
            known = known.narrow(other, 0, 1)
    return known.reshape(-1)


def _one_symbol(form: Affine, batch: int, node: Node) -> tuple[Node | None, Node]:
    if not form.symbols:
        return None, node
    symbol, *others = form.symbols
    if others or symbol.coefficient != 1:
        raise Refused("the limit of the mask is not one length plus a constant", node)
    count = torch.Size(shape(symbol.node)).numel()
    line = _line(symbol.elements, 0)
    if line is None or (count != 1 and (count != batch or not torch.equal(line, torch.arange(batch)))):
        raise Refused(f"{symbol.node.name} is not one length or one length a sequence", node)
    return symbol.node, symbol.reader


def length_operand(graph: Graph, length: Length, batch: int, before: Node) -> Node:
    """The int node of that length, created right behind the node that reads the symbol, or one that is there already.

    Behind the reader because a counter is stepped in place later: a sum made later would be one too large.
    """
    if length.symbol is None:
        device = length.reader.meta["val"].device
        return call(
            graph,
            ATEN.full.default,
            ([], length.offset),
            {"dtype": torch.int64, "device": device, "pin_memory": False},
            like=length.reader,
            before=before,
        )
    if length.offset == 0 and not _is_written(graph, length.symbol):
        return _as_lengths(graph, length.symbol, length.reader, batch)
    for user in length.symbol.users:
        if user.target is ATEN.add.Tensor and user.args == (length.symbol, length.offset) and user < before:
            if Length(length.offset, length.symbol, user).same_as(length, graph):
                return _as_lengths(graph, user, user, batch)
    node = call(graph, ATEN.add.Tensor, (length.symbol, length.offset), like=length.reader, after=length.reader)
    return _as_lengths(graph, node, node, batch)


def _is_written(graph: Graph, symbol: Node) -> bool:
    """Whether the graph writes the symbol's memory anywhere."""
    known: dict[Node, Node] = {}
    root = purity.storage_root(symbol, known)
    written = (node for writer in graph.nodes for node in purity.mutated_arguments(writer))
    return any(purity.storage_root(node, known) is root for node in written)


def _as_lengths(graph: Graph, node: Node, after: Node, batch: int) -> Node:
    """The node as the operators take lengths: [] or [B]."""
    sizes = shape(node)
    if sizes in ((), (batch,)):
        return node
    want = [] if torch.Size(sizes).numel() == 1 else [batch]
    return call(graph, ATEN.reshape.default, (node, want), like=node, after=after)


def length_of_node(node: Node, user: Node) -> Length:
    """The length that an operator's ``lengths`` operand stands for."""
    form = affine(node, user)
    if len(form.symbols) > 1:
        raise Refused("the lengths operand is no single length", node)
    if not form.symbols:
        return Length(int(form.known.reshape(-1)[0]), None, node)
    symbol = form.symbols[0]
    return Length(int(form.known.reshape(-1)[0]), symbol.node, symbol.reader)
