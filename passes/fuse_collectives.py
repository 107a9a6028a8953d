"""``fuse-collectives``: a short collective becomes one launch, in which ranks write into one another's memory.

A library's collective takes some ten microseconds however little it moves: its programs are told to start, meet, and
only then copy. ``rank_sum`` and ``rank_gather`` leave each word where it is wanted; that it has come is told by the
word itself. A gather brings parts to their places as well, which were a copy of its own.
"""

from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar

import torch
from torch.fx import Graph, Node

from kimigraph.ir.collectives import Pair, pairs
from kimigraph.ir.mesh import COLLECTIVES
from kimigraph.ir.operators import OPERATORS
from kimigraph.ir.program import CapturedProgram
from kimigraph.ir.provenance import module_path, source_line
from kimigraph.ir.remarks import PassResult, Remark
from kimigraph.passes.algebra.nodes import argument, shape
from kimigraph.passes.algebra.refusal import Refused
from kimigraph.passes.algebra.rewrite import call
from kimigraph.passes.base import Pass, PassContext

ATEN = torch.ops.aten
C10D: Any = getattr(torch.ops, COLLECTIVES)
WORD, ALIGNMENT = 4, 16
"""Bytes: what ranks send at a time, and where operands of kernels begin."""
MEGABYTE = 1 << 20


@dataclass(frozen=True)
class FuseCollectives(Pass):
    """Makes sums and gathers of one launch where ranks' GPUs are of one machine, and little is sent.

    Options: ``most-summed`` and ``most-gathered``, megabytes that a rank sends at most. Its memory has room for twice
    as much, for each kind of sum or gather.
    """

    name: ClassVar[str] = "fuse-collectives"
    summary: ClassVar[str] = "a short collective of GPUs is one launch, in which ranks write into one another's memory"
    level: ClassVar[int] = 2
    pattern: ClassVar[str] = "an `all_reduce` or `all_gather` and its wait, with the copy that puts parts side by side"
    constraints: ClassVar[tuple[str, ...]] = (
        "the target is CUDA; where GPUs turn out not to reach one another, the launch is the library's collective",
        "bf16 or fp32, whole words of 32 bits; int32 for gathers of picks",
        "a rank sends at most 4 MB for a sum, 16 MB for a gather",
    )
    effect: ClassVar[str] = "one `rank_sum` or `rank_gather`"

    most_summed: float = 4.0
    most_gathered: float = 16.0

    def apply(self, program: CapturedProgram, context: PassContext) -> PassResult:
        """Rewrite every collective that qualifies."""
        graph, remarks = program.graph_module.graph, list[Remark]()
        if not context.config.target.startswith("cuda"):
            return PassResult(False)
        for pair in pairs(graph):
            if not context.allow(f"one launch for {pair.start.name}"):
                continue
            try:
                remarks.append(self._told(self._fused(graph, pair, context), pair.start.name))
            except Refused as refusal:
                remarks.append(refusal.remark(self.name, pair.start))
        count = sum(remark.kind == "passed" for remark in remarks)
        if count:
            graph.lint()
            program.graph_module.recompile()
        return PassResult(count > 0, tuple(remarks), {"fused": count})

    def _fused(self, graph: Graph, pair: Pair, context: PassContext) -> Node:
        start = pair.start
        operand, group = start.all_input_nodes[0], str(start.args[-1])
        ways = context.config.mesh.sizes.get(group.rpartition(".")[2], 1)
        if ways < 2:
            raise Refused(f"group '{group}' is no dim of the mesh", start)
        _check(start, operand, ways, self.most_summed if _is_sum(start) else self.most_gathered)
        kwargs: dict[str, Any] = {"ways": ways, "group": group}
        last, made = pair.wait, OPERATORS["rank_sum"].overload
        if not _is_sum(start):
            last, kwargs["dim"] = _joined(pair.wait, ways)
            made = OPERATORS["rank_gather"].overload
        new = call(graph, made, (operand,), kwargs, like=last, before=start)
        new.meta["replaces"] = (start.name, pair.wait.name)
        last.replace_all_uses_with(new, propagate_meta=False)
        for node in dict.fromkeys((last, *pair.wait.users, pair.wait, start)):
            graph.erase_node(node)
        return new

    def _told(self, node: Node, replaced: str) -> Remark:
        value = node.meta["val"]
        message = f"{replaced} is one launch, {node.name}: {value.dtype} {list(value.shape)}"
        return Remark(
            "passed", self.name, message, node.name, source_line(node), (node.name,), score=1, module=module_path(node)
        )


def _is_sum(start: Node) -> bool:
    return start.target is C10D.all_reduce.default and start.args[1] == "sum"


def _check(start: Node, operand: Node, ways: int, most: float) -> None:
    """Refused where no kernel serves the collective, or its operand is large."""
    value = operand.meta["val"]
    known = {torch.bfloat16, torch.float32} | (set() if _is_sum(start) else {torch.int32})
    if not _is_sum(start) and start.target is not C10D.all_gather_into_tensor.default:
        raise Refused("it is no sum and no gather", start)
    aligned = value.storage_offset() * value.element_size() % ALIGNMENT == 0
    if value.dtype not in known or not (aligned and value.is_contiguous() and value.nbytes) or value.nbytes % WORD:
        raise Refused(f"{value.dtype}{list(value.shape)} is no contiguous run of words that the kernels know", operand)
    sent = value.nbytes * (ways - 1) / MEGABYTE
    if sent > most:
        raise Refused(f"each rank sends {sent:.1f} MB, more than {most:g}", operand)


def _joined(wait: Node, ways: int) -> tuple[Node, int]:
    """The node that has all parts side by side, and along which dim: a copy behind a gather, or the gather alone."""
    joins = {user for piece in wait.users for user in piece.users}
    [join] = joins if len(joins) == 1 else [wait]
    if join.target is not ATEN.cat.default:
        return wait, 0
    pieces, dim = argument(join, "tensors"), argument(join, "dim") % len(shape(wait))
    rows, run = shape(wait)[0] // ways, prod(shape(wait)[dim:]) * wait.meta["val"].element_size()
    wanted = [(wait, 0, rank * rows, (rank + 1) * rows) for rank in range(ways)]
    found = [piece.args for piece in pieces if piece.target is ATEN.slice.Tensor]
    return (join, dim) if found == wanted and len(wait.users) == ways and run % WORD == 0 else (wait, 0)
