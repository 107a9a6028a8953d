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
from kimigraph.ir.own_rows import OWN_ROWS
from kimigraph.ir.program import CapturedProgram
from kimigraph.ir.provenance import module_path, source_line
from kimigraph.ir.remarks import PassResult, Remark
from kimigraph.passes.algebra.nodes import argument, dtype, shape
from kimigraph.passes.algebra.rewrite import call, replace
from kimigraph.passes.base import Pass, PassContext
from kimigraph.passes.scheduling.communication import RATE
from kimigraph.passes.sharding.stretches import Stretches

ATEN = torch.ops.aten
C10D: Any = getattr(torch.ops, COLLECTIVES)
ALIGNMENT = 16
"""Bytes to a multiple of which kernels hold their inputs to lie."""
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
            taken = self.least_saved_us + node.meta["val"].nbytes * (ways - 1) / ways / RATE * 1e-3
            told = f"{saved:.1f} us of it are saved, of {taken:.1f} us that a gather takes"
            if refused or saved < taken:
                remarks.append(self._remark("missed", node, refused or told))
            elif context.allow(f"the rows of {node.name}"):
                share(node, ways)
                remarks.append(self._remark("passed", node, told))
        count = sum(remark.kind == "passed" for remark in remarks)
        if count:
            graph.lint()
            program.graph_module.recompile()
        return PassResult(count > 0, tuple(remarks), {"shared": count})

    def _remark(self, kind: Any, node: Node, message: str) -> Remark:
        place = module_path(node)
        return Remark(
            kind, self.name, f"{node.name}: {message}", node.name, source_line(node), (node.name,), module=place
        )


def _way(node: Node, ways: int) -> tuple[Callable[[Node, int], None], str]:
    """How ranks share out the rows of an indexer, and why they cannot; empty where they can."""
    batch, tokens, _ = shape(node)
    if batch % ways == 0:
        return _share_sequences, ""
    refused = ""
    if tokens % (2 * ways):
        refused = f", nor {2 * ways} pieces {tokens} queries"
    elif argument(node, "lengths") is None or argument(node, "mask") is not None:
        refused = ", and what its queries see is not told by a length"
    elif argument(node, "q_scales") is not None:
        refused = ", and its queries are bytes"
    return _share_queries, f"{ways} ranks do not divide {batch} sequences{refused}" if refused else ""


def _share_sequences(node: Node, ways: int) -> None:
    """Let ``node`` work on a rank's sequences, and gather what it gives in front of its users."""
    users, batch = list(node.users), shape(node)[0]
    names = (*OPERANDS, "keys" if argument(node, "block_table") is None else "block_table")
    operands = {operand for name in names if isinstance(operand := argument(node, name), Node)}
    for operand in operands:
        if shape(operand)[:1] == (batch,):
            own = call(node.graph, OWN_ROWS, (operand, ways, TP_GROUP), like=node, before=node)
            if own.meta["val"].nbytes % ALIGNMENT:  # the next rank's part begins where kernels may not begin to read
                own = call(node.graph, torch.ops.aten.clone.default, (own,), like=node, before=node)
            node.replace_input_with(operand, own)
    infer(node)
    pending = call(node.graph, C10D.all_gather_into_tensor.default, (node, ways, TP_GROUP), like=node, after=node)
    whole = call(node.graph, C10D.wait_tensor.default, (pending,), like=node, after=pending)
    for user in users:
        user.replace_input_with(node, whole)


def _share_queries(node: Node, ways: int) -> None:
    """Let each rank do two of ``2 ways`` pieces of the queries, the first with the last one, the second with the one
    before that, and so on."""
    ranks, (batch, tokens, picks) = Stretches(node, ways, TP_GROUP), shape(node)
    size, lengths = tokens // (2 * ways), argument(node, "lengths")
    counted: dict[str, Any] = {"dtype": torch.int64, "device": node.meta["val"].device}
    first = ranks.own(ranks.make(ATEN.arange.default, ways, **counted), 0)
    rest = {name: value for name, value in node.kwargs.items() if name not in ("lengths", "mask")}
    found: list[Node] = []
    for number in (first, ranks.make(ATEN.rsub.Scalar, first, 2 * ways - 1)):
        q, weights = (_piece(ranks, argument(node, name), number) for name in ("q", "weights"))
        begin = ranks.make(ATEN._to_copy.default, ranks.make(ATEN.mul.Tensor, number, size), dtype=dtype(lengths))
        begin = ranks.make(ATEN.add.Tensor, lengths, begin)
        piece = ranks.make(node.target, q, argument(node, "keys"), weights, begin, None, **rest)
        piece.meta["replaces"] = (node.name,)
        found.append(piece)
    whole = ranks.all(ranks.make(ATEN.stack.default, found, 0))
    early, late = (ranks.make(ATEN.select.int, whole, 1, place) for place in (0, 1))
    pieces = ranks.make(ATEN.cat.default, [early, ranks.make(ATEN.flip.default, late, [0])], 0)
    turned = ranks.make(ATEN.permute.default, pieces, [1, 0, 2, 3])
    replace(node, ranks.make(ATEN.reshape.default, turned, [batch, tokens, picks]))
    node.graph.erase_node(node)


def _piece(ranks: Stretches, value: Node, number: Node) -> Node:
    """One of the pieces of [B, S, ...]: [B, S / 2 W, ...]."""
    batch, tokens, *rest = shape(value)
    parts = ranks.make(ATEN.reshape.default, value, [batch, 2 * ranks.ways, tokens // (2 * ranks.ways), *rest])
    return ranks.make(ATEN.squeeze.dim, ranks.make(ATEN.index_select.default, parts, 1, number), 1)
