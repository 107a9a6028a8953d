"""``share-indexer-rows``: of an indexer that all ranks repeat, each does some sequences, and picks are gathered.

An indexer's heads are never split, and with tensor parallel ranks alone its keys are replicated: every rank would read
all of them. Sequences are independent, so each rank reads those of its own, and what crosses the wire are int32 picks.
"""

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
from kimigraph.passes.algebra.nodes import argument, shape
from kimigraph.passes.algebra.rewrite import call
from kimigraph.passes.base import Pass, PassContext

C10D: Any = getattr(torch.ops, COLLECTIVES)
ALIGNMENT = 16
"""Bytes to a multiple of which kernels hold their inputs to lie."""
OPERANDS = ("q", "weights", "lengths", "mask", "q_scales")
"""Operands with a row for each sequence; of keys in pages it is the block table."""


@dataclass(frozen=True)
class ShareIndexerRows(Pass):
    """Gives each of ``tp`` ranks its sequences of an indexer, where that saves at least ``least_saved_us``.

    The least is what a gather of some hundred kilobytes takes between two H200s.
    """

    least_saved_us: float = 15.0

    name: ClassVar[str] = "share-indexer-rows"
    summary: ClassVar[str] = "of an indexer that tp ranks repeat, each does its sequences, and the picks are gathered"
    level: ClassVar[int] = 2
    pattern: ClassVar[str] = "`lightning_indexer` of which all operands are replicated"
    constraints: ClassVar[tuple[str, ...]] = (
        "`--tp` is more than 1 and divides the batch",
        "the part of its time that is saved is more than a gather takes, under the cost model",
    )
    effect: ClassVar[str] = "the indexer on views of a rank's rows (`own_rows`), and a gather of its picks"

    def apply(self, program: CapturedProgram, context: PassContext) -> PassResult:
        """Rewrite every indexer that pays."""
        ways = context.config.tp
        if ways == 1:
            return PassResult(False)
        graph, remarks = program.graph_module.graph, list[Remark]()
        for node in graph.find_nodes(op="call_function", target=OPERATORS["lightning_indexer"].overload):
            batch = shape(argument(node, "q"))[0]
            saved = work_of(node).seconds(context.device) * (1 - 1 / ways) * 1e6
            told = f"{saved:.1f} us of it are saved, of {self.least_saved_us} us that a gather takes"
            if batch % ways:
                remarks.append(self._remark("missed", node, f"{ways} ranks do not divide {batch} sequences"))
            elif saved < self.least_saved_us:
                remarks.append(self._remark("missed", node, told))
            else:
                _share(node, batch, ways)
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


def _share(node: Node, batch: int, ways: int) -> None:
    """Let ``node`` work on a rank's rows, and gather what it gives in front of its users."""
    users = list(node.users)
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
