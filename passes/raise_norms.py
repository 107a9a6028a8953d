"""``raise-norms``: an RMS norm that is written out becomes ``rms_norm``, with the residual sum that it alone reads.

Anchored at a reciprocal root; evidence: a mean of squares plus a constant below it, the product with what was squared
above it, then weight and rounding in either order.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import Graph, Node

from kimigraph.ir import purity
from kimigraph.ir.operators import OPERATORS
from kimigraph.ir.program import CapturedProgram
from kimigraph.passes.algebra.nodes import is_cast, packet
from kimigraph.passes.algebra.refusal import Refused
from kimigraph.passes.algebra.rewrite import call, replace
from kimigraph.passes.algebra.rms import Norm, finished_norm, mean_below, norm_path
from kimigraph.passes.algebra.rule import FusionPass

ATEN = torch.ops.aten


@dataclass(frozen=True)
class RaiseNorms(FusionPass):
    """Names RMS norms over the last dim, for ``fuse-pointwise`` and for people who read the graph.

    Refused: intermediate values that are used elsewhere, operands that are written before the norm is done, results
    that are not rounded to the type of what is normed.
    """

    name: ClassVar[str] = "raise-norms"
    summary: ClassVar[str] = "a written-out RMS norm becomes rms_norm"
    fusion: ClassVar[bool] = True
    pattern: ClassVar[str] = (
        "a tensor times the `rsqrt` of the mean of its squares over the last dim plus a constant, then a weight and a "
        "cast in either order; before it a sum that nothing else reads"
    )
    constraints: ClassVar[tuple[str, ...]] = (
        "arithmetic in float32, the result in the type of the operand",
        "the weight is a vector as wide as the norm, or absent",
        "the intermediate values are used nowhere else",
        "no operand is written between its use and the result",
        "bfloat16, float16 or float32",
    )
    effect: ClassVar[str] = "`rms_norm`, with the residual where the sum was for the norm alone"

    def anchors(self, graph: Graph) -> Sequence[Node]:
        """The reciprocal roots of means."""
        return [node for node in graph.nodes if node.target is ATEN.rsqrt.default and mean_below(node) is not None]

    def check(self, program: CapturedProgram, anchor: Node) -> Norm:
        """The norm around this root."""
        wide, eps, path = norm_path(anchor)
        try:
            norm = finished_norm(wide, eps, path)
            _require_inside(program.graph_module.graph, norm)
        except Refused as refusal:
            raise refusal.raised_to(len(path), path) from refusal
        return norm

    def rewrite(self, program: CapturedProgram, site: Norm) -> Node:
        """Put the operator before the last node of the norm."""
        node = call(
            program.graph_module.graph,
            OPERATORS["rms_norm"].overload,
            (site.x, site.weight, site.residual),
            {"eps": site.eps, "rounds_first": site.rounds_first},
            like=site.out,
            before=site.out,
            replaces=site.path,
        )
        replace(site.out, node)
        return node


def _require_inside(graph: Graph, norm: Norm) -> None:
    """Refuse when what vanishes is used outside, or an operand is written before the norm's place."""
    gone = {node for node in norm.path if not (is_cast(node) and node is norm.path[0])}
    for node in norm.path[:-1]:
        for user in node.users:
            if node in gone and user not in norm.path and packet(user) != "_assert_tensor_metadata":
                raise Refused(f"the intermediate {node.name} is used elsewhere, by {user.name}", node)
    for what in (norm.x, norm.weight, norm.residual):
        if what is None:
            continue
        for reader in sorted(_readers(what, norm.path))[:1]:
            writer = purity.mutation_between(graph, what, reader, norm.out)
            if writer is not None:
                raise Refused(f"the operand {what.name} is written between its use and {norm.out.name}", writer)


def _readers(operand: Node, path: Sequence[Node]) -> list[Node]:
    """What of the norm reads an operand before its last node: others that vanish, and casts, which it does itself."""
    inside = set(path)
    casts = [user for user in operand.users if is_cast(user) and any(reader in inside for reader in user.users)]
    return [user for user in (*casts, *(user for user in operand.users if user in inside)) if user is not path[-1]]
