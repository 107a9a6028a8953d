"""``balance-indexer``: ranks that each have a stretch of a prefill score early and late queries alike.

A late query sees more keys than an early one, so of W stretches the last has (2 W - 1) / W of the mean to score. Each
rank cuts its stretch into W pieces and gives one to every rank, those of every second stretch in reverse: together the
pieces of a rank see as many keys as those of any other, or nearly so where W is odd. Queries and head weights cross,
and picks come back.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.fx import Node

from kimigraph.ir.cost import work_of
from kimigraph.ir.mesh import COLLECTIVES, SP_GROUP
from kimigraph.ir.operators import OPERATORS
from kimigraph.ir.program import CapturedProgram
from kimigraph.ir.remarks import PassResult, Remark
from kimigraph.passes.algebra.nodes import argument, dtype, shape
from kimigraph.passes.base import Pass, PassContext
from kimigraph.passes.scheduling.communication import LATENCY_US
from kimigraph.passes.sharding.query_pieces import cut, put_back, rank_numbers, refusal, remark, scored
from kimigraph.passes.sharding.stretches import Stretches
from kimigraph.passes.share_tokens import STRETCH

ATEN = torch.ops.aten
C10D: Any = getattr(torch.ops, COLLECTIVES)
INDEXER = OPERATORS["lightning_indexer"].overload
ALL_TO_ALL_RATE = 120.0
"""Gigabytes a second of a rank: 406 MB in 3.4 ms between two H200s (bench/results/sp2_prefill.json)."""


@dataclass(frozen=True)
class BalanceIndexer(Pass):
    """Exchanges pieces of the ranks' queries where that saves more than it moves, or ``always``.

    What it saves is priced for sequences with nothing in front of the step.
    """

    always: bool = False

    name: ClassVar[str] = "balance-indexer"
    summary: ClassVar[str] = "sp ranks of a prefill exchange queries, so that all have about as many keys to score"
    level: ClassVar[int] = 2
    pattern: ClassVar[str] = "`lightning_indexer` over the queries of a stretch"
    constraints: ClassVar[tuple[str, ...]] = (
        "`share-tokens` has given each rank a stretch, whose tokens the number of ranks divides",
        "what a query sees is a length, not a mask; queries are not bytes",
        "what the last stretch has above the mean takes longer than queries and picks on the wire, by the cost model",
    )
    effect: ClassVar[str] = (
        "an `all_to_all_single` of queries and head weights, an indexer for each piece, then one of the picks"
    )

    def apply(self, program: CapturedProgram, context: PassContext) -> PassResult:
        """Rewrite every indexer of a stretch for which it pays."""
        ways, remarks, moved = context.config.sp, list[Remark](), 0
        graph = program.graph_module.graph
        for node in graph.find_nodes(op="call_function", target=INDEXER):
            if not node.meta.get(STRETCH):
                continue
            refused = _refused(node, ways) or ("" if self.always else _dear(node, ways, context))
            if refused:
                remarks.append(remark("missed", self.name, node, refused))
            elif context.allow(f"the queries of {node.name}"):
                told = f"its queries cross in {ways} pieces a rank, {_gain(ways):.2f} times fewer keys to score"
                remarks.append(remark("passed", self.name, node, told))
                moved += _bytes(node) * (ways - 1) // ways
                _balance(node, ways)
        count = sum(one.kind == "passed" for one in remarks)
        if count:
            graph.lint()
            program.graph_module.recompile()
        return PassResult(count > 0, tuple(remarks), {"balanced": count, "bytes_sent": moved})


def _refused(indexer: Node, ways: int) -> str:
    """Why the queries of a stretch cannot be exchanged; empty where they can."""
    tokens = shape(argument(indexer, "q"))[1]
    if tokens % ways:
        return f"{ways} ranks do not divide {tokens} queries of a stretch"
    return refusal(indexer)


def _dear(indexer: Node, ways: int, context: PassContext) -> str:
    """How much longer the crossing takes than what it saves; empty where it is shorter."""
    tokens, keys = shape(argument(indexer, "q"))[1], shape(argument(indexer, "keys"))[1]
    last, most = _loads(ways)
    saved = work_of(indexer).seconds(context.device) * (last - most) * tokens / (ways**2 * max(keys, 1))
    saved /= context.config.tp  # of its pieces tp ranks do a part each, but all of them exchange all queries
    crossing = 3e-6 * LATENCY_US + _bytes(indexer) * (ways - 1) / ways / (ALL_TO_ALL_RATE * 1e9)
    copying = 4 * _bytes(indexer) / context.device.bytes_per_second  # put in order on both sides, read and written
    if saved > crossing + copying:
        return ""
    return f"{saved * 1e6:.1f} us of it would be saved, of {(crossing + copying) * 1e6:.1f} that queries take to cross"


def _bytes(indexer: Node) -> int:
    """Bytes of a rank's queries, weights and picks."""
    return sum(node.meta["val"].nbytes for node in (*(argument(indexer, name) for name in ("q", "weights")), indexer))


def _gain(ways: int) -> float:
    """Keys that the queries of the last stretch see, of those that the queries of a rank see then."""
    last, most = _loads(ways)
    return last / most


def _loads(ways: int) -> tuple[float, float]:
    """Keys that a stretch of W pieces sees, the last one's, and the pieces of a rank, the most; in a piece's keys."""
    ranks = [
        sum(stretch * ways + (ways - 1 - rank if stretch % 2 else rank) + 0.5 for stretch in range(ways))
        for rank in range(ways)
    ]
    return sum((ways - 1) * ways + piece + 0.5 for piece in range(ways)), max(ranks)


def _balance(indexer: Node, ways: int) -> None:
    """Let the ranks score one another's queries."""
    ranks, tokens = Stretches(indexer, ways), shape(indexer)[1]
    numbers = rank_numbers(ranks, indexer)
    rank = ranks.own(numbers, 0)
    order = _order(ranks, numbers, rank)
    q, weights = (_crossed(ranks, cut(ranks, argument(indexer, name), ways, order)) for name in ("q", "weights"))
    found: list[Node] = []
    for stretch in range(ways):
        lengths = _lengths(ranks, argument(indexer, "lengths"), rank, stretch, tokens)
        found.append(scored(ranks, indexer, ranks.number(q, stretch), ranks.number(weights, stretch), lengths))
    back = _crossed(ranks, ranks.make(ATEN.stack.default, found, 0))
    put_back(ranks, indexer, ranks.make(ATEN.index_select.default, back, 0, order))


def _order(ranks: Stretches, numbers: Node, rank: Node) -> Node:
    """Which piece of this rank's each rank gets, [W]: on every second rank the last one goes to the first."""
    odd = ranks.make(ATEN.remainder.Scalar, rank, 2)
    to_end = ranks.make(ATEN.rsub.Scalar, ranks.make(ATEN.mul.Tensor, numbers, 2), ranks.ways - 1)
    return ranks.make(ATEN.add.Tensor, numbers, ranks.make(ATEN.mul.Tensor, odd, to_end))


def _crossed(ranks: Stretches, pieces: Node) -> Node:
    """The piece of every rank for this one, in the order of the ranks."""
    one_each = [1] * ranks.ways
    pending = ranks.make(C10D.all_to_all_single.default, pieces, one_each, one_each, SP_GROUP)
    return ranks.make(C10D.wait_tensor.default, pending)


def _lengths(ranks: Stretches, lengths: Node, rank: Node, stretch: int, tokens: int) -> Node:
    """What the first query of the piece of a stretch that this rank gets sees, ``lengths`` being that of its own."""
    size = tokens // ranks.ways
    turned = stretch % 2 == 1
    begin = stretch * tokens + (ranks.ways - 1) * size * turned
    far = ranks.make(ATEN.mul.Tensor, rank, -size - tokens if turned else size - tokens)
    far = ranks.make(ATEN.add.Tensor, far, begin)
    return ranks.make(ATEN.add.Tensor, lengths, ranks.make(ATEN._to_copy.default, far, dtype=dtype(lengths)))
