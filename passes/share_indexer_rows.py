"""``share-indexer-rows``: of an indexer that all ranks repeat, each does some rows, and picks are gathered.

An indexer's heads are never split, and with tensor parallel ranks alone its keys are replicated: every rank would read
all of them. Sequences are independent, so each rank reads those of its own, and what crosses the wire are int32 picks.
Of sequences that ranks do not divide each takes queries, an early and a late piece: the later, the more keys they see.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.fx import Node

from kimigraph.ir.cost import work_of
from kimigraph.ir.fake import infer
from kimigraph.ir.mesh import COLLECTIVES, TP_GROUP
from kimigraph.ir.operators import OPERATORS
from kimigraph.ir.program import CapturedProgram
from kimigraph.ir.remarks import PassResult, Remark
from kimigraph.passes.algebra.nodes import argument, dtype, shape
from kimigraph.passes.algebra.rewrite import call
from kimigraph.passes.base import Pass, PassContext
from kimigraph.passes.scheduling.communication import RATE, Links
from kimigraph.passes.sharding.query_pieces import cut, put_back, rank_numbers, refusal, remark, scored
from kimigraph.passes.sharding.stretches import Stretches

ATEN = torch.ops.aten
C10D: Any = getattr(torch.ops, COLLECTIVES)
OPERANDS = ("q", "weights", "lengths", "mask", "q_scales")
"""Operands with a row for each sequence; of keys in pages it is the block table."""


@dataclass(frozen=True)
class ShareIndexerRows(Pass):
    """Gives each of ``tp`` ranks its part of an indexer, where that saves at least ``least_saved_us`` and what picks
    take to cross.

    The least is what a gather of some hundred kilobytes takes between two H200s.
    """

    least_saved_us: float = 15.0

    name: ClassVar[str] = "share-indexer-rows"
    summary: ClassVar[str] = "of an indexer that tp ranks repeat, each does some rows, and the picks are gathered"
    level: ClassVar[int] = 2
    pattern: ClassVar[str] = "`lightning_indexer` of which all operands are replicated"
    constraints: ClassVar[tuple[str, ...]] = (
        "`--tp` is more than 1 and divides the batch; or twice `--tp` divides the queries, what a query sees is a "
        "length, not a mask, and queries are not bytes",
        "the part of its time that is saved is more than a gather takes, under the cost model",
    )
    effect: ClassVar[str] = "the indexer on a rank's rows (`own_rows`), and a gather of its picks"

    def apply(self, program: CapturedProgram, context: PassContext) -> PassResult:
        """Rewrite every indexer that pays."""
        ways = context.config.tp
        if ways == 1:
            return PassResult(False)
        graph, remarks = program.graph_module.graph, list[Remark]()
        for node in graph.find_nodes(op="call_function", target=OPERATORS["lightning_indexer"].overload):
            share, refused = _way(node, ways)
            saved = work_of(node).seconds(context.device) * (1 - 1 / ways) * 1e6
            taken = Links(self.least_saved_us * 1e-6, RATE * 1e9).seconds(node, ways) * 1e6
            told = f"{saved:.1f} us of it are saved, of {taken:.1f} us that a gather takes"
            if refused or saved < taken:
                remarks.append(remark("missed", self.name, node, refused or told))
            elif context.allow(f"the rows of {node.name}"):
                share(node, ways)
                remarks.append(remark("passed", self.name, node, told))
        count = sum(one.kind == "passed" for one in remarks)
        if count:
            graph.lint()
            program.graph_module.recompile()
        return PassResult(count > 0, tuple(remarks), {"shared": count})


def _way(node: Node, ways: int) -> tuple[Callable[[Node, int], None], str]:
    """How ranks share out the rows of an indexer, and why they cannot; empty where they can."""
    batch, tokens, _ = shape(node)
    if batch % ways == 0:
        return _share_sequences, ""
    if tokens % (2 * ways):
        return _share_queries, f"{ways} ranks do not divide {batch} sequences, nor {2 * ways} pieces {tokens} queries"
    refused = refusal(node)
    return _share_queries, f"{ways} ranks do not divide {batch} sequences, and {refused}" if refused else ""


def _share_sequences(node: Node, ways: int) -> None:
    """Let ``node`` work on a rank's sequences, and gather what it gives in front of its users."""
    users, batch = list(node.users), shape(node)[0]
    names = (*OPERANDS, "keys" if argument(node, "block_table") is None else "block_table")
    operands = {operand for name in names if isinstance(operand := argument(node, name), Node)}
    for operand in operands:
        if shape(operand)[:1] == (batch,):
            node.replace_input_with(operand, Stretches(node, ways, TP_GROUP).own(operand, 0))
    infer(node)
    pending = call(node.graph, C10D.all_gather_into_tensor.default, (node, ways, TP_GROUP), like=node, after=node)
    whole = call(node.graph, C10D.wait_tensor.default, (pending,), like=node, after=pending)
    for user in users:
        user.replace_input_with(node, whole)


def _share_queries(node: Node, ways: int) -> None:
    """Let each rank do two of ``2 ways`` pieces of the queries, the first with the last one, the second with the one
    before that, and so on."""
    ranks, tokens, count = Stretches(node, ways, TP_GROUP), shape(node)[1], 2 * ways
    first, lengths = ranks.own(rank_numbers(ranks, node), 0), argument(node, "lengths")
    found: list[Node] = []
    for number in (first, ranks.make(ATEN.rsub.Scalar, first, count - 1)):
        q, weights = (ranks.number(cut(ranks, argument(node, name), count, number), 0) for name in ("q", "weights"))
        begin = ranks.make(ATEN.mul.Tensor, number, tokens // count)
        begin = ranks.make(ATEN._to_copy.default, begin, dtype=dtype(lengths))
        found.append(scored(ranks, node, q, weights, ranks.make(ATEN.add.Tensor, lengths, begin)))
    whole = ranks.all(ranks.make(ATEN.stack.default, found, 0))
    early, late = (ranks.make(ATEN.select.int, whole, 1, place) for place in (0, 1))
    put_back(ranks, node, ranks.make(ATEN.cat.default, [early, ranks.make(ATEN.flip.default, late, [0])], 0))
