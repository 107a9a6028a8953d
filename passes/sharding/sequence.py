"""Which tokens of a sequence a rank has, in a graph: places of positions, and how many of the first tokens.

Arithmetic on integers, in operators of ATen. A rank's number is one entry of ``arange``, which ``own_rows`` takes: so
the graph is one for all ranks.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, Node

from kimigraph.ir.descriptors import IndexKeyDescriptor, LatentDescriptor, parse_descriptor
from kimigraph.ir.errors import UsageError
from kimigraph.ir.mesh import SP_GROUP
from kimigraph.ir.own_rows import OWN_ROWS
from kimigraph.ir.shares import Share
from kimigraph.passes.algebra.nodes import dtype, shape
from kimigraph.passes.algebra.rewrite import call

ATEN = torch.ops.aten
RUN = 64
"""Most tokens of a run: as many as a page has."""


def holds_tokens(descriptor: str) -> bool:
    """Whether a cache of that descriptor has a row for each token."""
    return isinstance(parse_descriptor(descriptor), LatentDescriptor | IndexKeyDescriptor)


def shared_tokens(shape: tuple[int, ...], ways: int, paged: bool, source: str) -> Share:
    """How ``ways`` ranks share out the tokens, dim -2, of a cache: runs go to them in turn.

    A page is a round of runs. A sequence without pages has runs of the largest power of two up to 64 that makes whole
    rounds. UsageError where ranks cannot have equal shares.
    """
    tokens, dim = shape[-2], len(shape) - 2
    if tokens % ways:
        near = -(-tokens // (RUN * ways)) * RUN * ways
        raise UsageError(
            f"sp {ways} does not divide the {tokens} tokens of {source}: give a context that it divides, such as {near}"
        )
    run = tokens // ways
    if not paged:
        run = next(size for size in (64, 32, 16, 8, 4, 2, 1) if tokens % (size * ways) == 0)
    return Share(dim, tokens // (run * ways), ways)


@dataclass
class Places:
    """The tokens of one form of sharing: ``ways`` ranks have runs of ``run`` tokens in turn."""

    graph: Graph
    ways: int
    run: int
    _known: dict[tuple[str, Node], Node] = field(default_factory=lambda: {})
    _ranks: dict[torch.dtype, Node] = field(default_factory=lambda: {})

    def of(self, positions: Node) -> Node:
        """The rank's places of positions in the sequence, -1 for those of other ranks and below 0; a node before their
        first reader."""
        if ("of", positions) not in self._known:
            ways, run = self.ways, self.run
            number = _Numbers(self.graph, positions)
            owner = number.remainder(number.floor(positions, run), ways)
            place = number.add(number.times(number.floor(positions, run * ways), run), number.remainder(positions, run))
            mine = number.make(ATEN.eq.Tensor, owner, self._rank(positions))
            none = number.make(ATEN.full_like.default, place, -1)
            self._known["of", positions] = number.make(ATEN.where.self, mine, place, none)
        return self._known["of", positions]

    def held(self, lengths: Node) -> Node:
        """How many of the first ``lengths`` tokens the rank has."""
        if ("held", lengths) not in self._known:
            ways, run = self.ways, self.run
            number = _Numbers(self.graph, lengths)
            rest = number.remainder(lengths, run * ways)
            before = number.times(self._rank(lengths), run)
            own = number.make(ATEN.clamp.default, number.make(ATEN.sub.Tensor, rest, before), 0, run)
            self._known["held", lengths] = number.add(number.times(number.floor(lengths, run * ways), run), own)
        return self._known["held", lengths]

    def _rank(self, like: Node) -> Node:
        """The number of this process's rank, [1], of the type of ``like``; it stands in front of all other nodes."""
        kind = dtype(like) or torch.int64
        if kind not in self._ranks:
            first = next(node for node in self.graph.nodes if node.op not in ("placeholder", "get_attr"))
            options: dict[str, Any] = {"dtype": kind, "device": like.meta["val"].device}
            every = call(self.graph, ATEN.arange.default, (self.ways,), options, like=like, before=first)
            self._ranks[kind] = call(self.graph, OWN_ROWS, (every, self.ways, SP_GROUP), like=like, before=first)
        return self._ranks[kind]


class _Numbers:
    """Integer arithmetic behind the node that it starts from."""

    def __init__(self, graph: Graph, first: Node) -> None:
        self._graph, self._like, self._last = graph, first, first
        while self._last.op == "placeholder" and self._last.next.op == "placeholder":
            self._last = self._last.next

    def make(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        """A call behind the last one."""
        ranks = [item for item in args if isinstance(item, Node) and item.target is OWN_ROWS]
        after = max([self._last, *ranks]) if ranks else self._last
        self._last = call(self._graph, target, args, kwargs, like=self._like, after=after)
        return self._last

    def floor(self, value: Node, by: int) -> Node:
        """The quotient, rounded down."""
        return self.make(ATEN.div.Tensor_mode, value, by, rounding_mode="floor")

    def remainder(self, value: Node, by: int) -> Node:
        """What is left of that; not negative."""
        return self.make(ATEN.remainder.Scalar, value, by)

    def times(self, value: Node, by: int) -> Node:
        """The product."""
        return self.make(ATEN.mul.Tensor, value, by)

    def add(self, one: Node, other: Node) -> Node:
        """The sum."""
        return self.make(ATEN.add.Tensor, one, other)


def rows_of_limits(lengths: Node | None, rows: int, tokens: int, before: Node) -> Node:
    """How many tokens each of ``rows`` queries of a sequence sees, of ``tokens`` at most: [B or 1, rows].

    ``lengths`` are those of the first query, [] or [B]; None: all.
    """
    graph, like = before.graph, lengths if lengths is not None else before
    if lengths is None:
        options: dict[str, Any] = {"dtype": torch.int64, "device": before.meta["val"].device}
        return call(graph, ATEN.full.default, ([1, rows], tokens), options, like=before, before=before)
    column = call(graph, ATEN.reshape.default, (lengths, [-1, 1]), like=like, before=before)
    if rows > 1:
        options = {"dtype": dtype(lengths), "device": lengths.meta["val"].device}
        more = call(graph, ATEN.arange.default, (rows,), options, like=like, before=before)
        column = call(graph, ATEN.add.Tensor, (column, more), like=like, before=before)
    assert shape(column)[1] == rows
    return call(graph, ATEN.clamp_max.default, (column, tokens), like=like, before=before)
