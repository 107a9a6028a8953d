"""``canonicalize``: one form for what models and front ends spell in many ways."""

from dataclasses import dataclass
from typing import ClassVar

from torch.fx import Graph

from kimigraph.ir.program import CapturedProgram
from kimigraph.ir.provenance import source_line
from kimigraph.ir.purity import dead_code
from kimigraph.ir.remarks import PassResult, Remark
from kimigraph.passes.algebra.refusal import Refused
from kimigraph.passes.base import Pass, PassContext
from kimigraph.passes.cleanup.asserts import drop_metadata_asserts, drop_scalar_asserts
from kimigraph.passes.cleanup.common import merge_common
from kimigraph.passes.cleanup.decompact import find_compactions, fold_sizes, prove_removable, remove_compaction
from kimigraph.passes.cleanup.foreign import foreign_operators
from kimigraph.passes.cleanup.no_ops import drop_no_ops
from kimigraph.passes.cleanup.storage import StorageFacts


@dataclass(frozen=True)
class Canonicalize(Pass):
    """Drops what the graph's metadata proves needless, shares equal pure nodes, undoes compaction, erases dead code.

    Writes, random numbers, assertions that could fail, and everything that keeps two outputs or two versions of a
    mutated tensor apart stay as they are. Values do not change, not in the last bit. With ``decompact=false`` axes
    whose size depends on data are left alone.
    """

    name: ClassVar[str] = "canonicalize"
    summary: ClassVar[str] = "drop provable asserts and no-ops, merge equal nodes, undo compaction, erase dead code"
    pattern: ClassVar[str] = (
        "assertions that metadata proves, views and casts that change nothing, equal pure nodes, tensors compacted by "
        "a mask before a top-k, nodes that nothing uses"
    )
    constraints: ClassVar[tuple[str, ...]] = (
        "no value changes, not in the last bit",
        "writes, random numbers and assertions that could fail stay",
    )
    effect: ClassVar[str] = "fewer nodes, one spelling, static shapes"

    decompact: bool = True

    def apply(self, program: CapturedProgram, context: PassContext) -> PassResult:
        """Clean up the graph in place; statistics count each kind of change."""
        graph = program.graph_module.graph
        remarks = foreign_operators(graph, self.name)
        statistics = {
            "asserts-dropped": drop_metadata_asserts(graph),
            "no-ops-dropped": drop_no_ops(graph, context.allow),
            "nodes-merged": merge_common(graph, context.allow),
        }
        removed = _undo_compactions(graph, remarks, context) if self.decompact else 0
        if removed:
            statistics["compactions-undone"] = removed
            statistics["sizes-folded"] = fold_sizes(graph)
            statistics["asserts-dropped"] += drop_scalar_asserts(graph) + drop_metadata_asserts(graph)
            statistics["no-ops-dropped"] += drop_no_ops(graph, context.allow)
        statistics["dead-erased"] = dead_code(graph)
        return PassResult(any(statistics.values()), tuple(remarks), statistics)


def _undo_compactions(graph: Graph, remarks: list[Remark], context: PassContext) -> int:
    compactions = find_compactions(graph)
    if not compactions:
        return 0
    facts, removed = StorageFacts.of(graph), 0
    for compaction in compactions:
        keep = compaction.keep
        sites = tuple(site.name for site in compaction.sites)
        try:
            prove_removable(graph, compaction, facts)
        except Refused as refusal:
            remarks.append(refusal.remark(Canonicalize.name, keep))
            continue
        if not context.allow(f"undo the compaction at {keep.name}"):
            continue
        remove_compaction(graph, compaction)
        message = f"{keep.name}: compaction undone, for the mask of the top-k refuses what it drops"
        remarks.append(Remark("passed", Canonicalize.name, message, keep.name, source_line(keep), sites))
        removed += 1
    return removed
