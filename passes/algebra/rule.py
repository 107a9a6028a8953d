"""What the fusion passes have in common: anchors, checks with a reason, rewrites, remarks."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx import Graph, Node

from kimigraph.ir import purity
from kimigraph.ir.program import CapturedProgram
from kimigraph.ir.provenance import module_path, source_line
from kimigraph.ir.remarks import PassResult, Remark, Via
from kimigraph.passes.algebra.frames import Operand
from kimigraph.passes.algebra.nodes import packet
from kimigraph.passes.algebra.refusal import Refused
from kimigraph.passes.base import Pass, PassContext

NEAR = 1
"""A refusal with less evidence than this is no near miss, and is not reported."""


@dataclass(frozen=True)
class FusionPass(Pass):
    """A pass that replaces what surrounds an anchor by one operator.

    A subclass finds anchors, checks one (raising ``Refused``) and rewrites one that was checked. The graph stays as it
    is when a check refuses.
    """

    def apply(self, program: CapturedProgram, context: PassContext) -> PassResult:
        """Fuse every site, then drop what nothing uses any more."""
        graph = program.graph_module.graph
        remarks: list[Remark] = []
        for anchor in self.anchors(graph):
            try:
                site = self.check(program, anchor)
            except Refused as refusal:
                if refusal.score >= NEAR:
                    remarks.append(refusal.remark(self.name, anchor))
                continue
            if not context.allow(f"{anchor.name} ({source_line(anchor) or 'no source line'})"):
                continue
            node, note = self.rewrite(program, site), self.note(site)
            remarks.append(self._passed(anchor, node, self.via(site)))
            if note:
                remarks.append(Remark("note", self.name, note, node.name, source_line(node)))
        fused = sum(remark.kind == "passed" for remark in remarks)
        erased = purity.dead_code(graph) if fused else 0
        if fused:
            graph.lint()
            program.graph_module.recompile()
        return PassResult(fused > 0, tuple(remarks), {"fused": fused, "erased": erased})

    def anchors(self, graph: Graph) -> Sequence[Node]:
        """The nodes at which a site may end, in graph order."""
        raise NotImplementedError

    def check(self, program: CapturedProgram, anchor: Node) -> Any:
        """The site at that anchor. Raises ``Refused`` with the evidence that held; changes nothing."""
        raise NotImplementedError

    def rewrite(self, program: CapturedProgram, site: Any) -> Node:
        """Replace a checked site; returns the new operator's node, whose ``meta["replaces"]`` names the old anchors."""
        raise NotImplementedError

    def note(self, site: Any) -> str:
        """What a rewrite takes for granted at that site, for people; empty if nothing."""
        del site
        return ""

    def via(self, site: Any) -> Via:
        """How the site was found: by its ``pattern`` alone, or beginning at an operator that a ``mark`` put there."""
        del site
        return "pattern"

    def _passed(self, anchor: Node, node: Node, via: Via) -> Remark:
        replaced = tuple(node.meta.get("replaces", ()))
        return Remark(
            kind="passed",
            pass_name=self.name,
            message=f"{', '.join(replaced)} became {node.name}",
            node=node.name,
            source=source_line(node) or source_line(anchor),
            nodes=(*replaced, node.name),
            via=via,
            score=len(replaced),
            module=module_path(node) or module_path(anchor),
        )


def require_unused_elsewhere(path: Sequence[Node], ends: Sequence[Node]) -> None:
    """Refuse when a node that is to vanish is used outside the match: it would have to be computed all the same."""
    inside = {*path, *ends}
    for node in path:
        for user in node.users:
            if user not in inside and packet(user) != "_assert_tensor_metadata":
                raise Refused(f"the intermediate {node.name} is used elsewhere, by {user.name}", node)


def require_unwritten(graph: Graph, what: str, operand: Operand, until: Node) -> None:
    """Refuse when the operand's memory is written between its old reader and the new operator's place."""
    if operand.reader is until or not operand.reader < until:
        return
    writer = purity.mutation_between(graph, operand.node, operand.reader, until)
    if writer is not None:
        raise Refused(f"{what} {operand.node.name} is written between its use and {until.name}", writer)


def descriptor_of(program: CapturedProgram, node: Node) -> str:
    """The descriptor of the cache whose memory a node shares, or an empty text."""
    root = purity.storage_root(node)
    return next((spec.descriptor for spec in program.inputs if spec.name == root.name), "")
