"""``raise-moe``: a router's top-k, its experts' products and their weighted sum become one operator.

Anchored at a top-k over the scores of experts; evidence: weights gathered from the same scores, two products with the
picked experts' weights around a gated activation, the sum over the picks, and what follows where it is there.
"""

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import Graph, Node

from kimigraph.ir.operators import OPERATORS
from kimigraph.ir.program import CapturedProgram
from kimigraph.ir.purity import mutated_arguments
from kimigraph.ir.row_products import MOST_ROWS
from kimigraph.passes.algebra.experts import RoutedExperts, experts_at
from kimigraph.passes.algebra.experts_tail import Tail, tail_of
from kimigraph.passes.algebra.frames import Operand, require_type
from kimigraph.passes.algebra.nodes import FLOATS, packet, shape
from kimigraph.passes.algebra.refusal import Refused
from kimigraph.passes.algebra.rewrite import build, call, replace
from kimigraph.passes.algebra.routing import Routing, is_router, routing_at
from kimigraph.passes.algebra.rule import FusionPass, require_unused_elsewhere, require_unwritten

ATEN = torch.ops.aten
_NAMED = frozenset(("topk", "bmm", "matmul", "_grouped_mm", "grouped_mm", "linear", "rms_norm", "sum"))


@dataclass(frozen=True)
class MoeSite:
    """A checked block of experts: its parts, the operands by name, and the nodes that vanish."""

    routing: Routing
    experts: RoutedExperts
    tail: Tail
    operands: dict[str, Operand]
    inside: tuple[Node, ...]


@dataclass(frozen=True)
class RaiseMoe(FusionPass):
    """Names blocks of routed experts, with norm, outward product and shared experts behind them for a few tokens.

    Of more than ``tail_tokens`` tokens those stay products of a library. Refused: scores that are no sigmoid, weights
    that are not the unbiased scores, experts in a form or with an activation that is not known, values used elsewhere.
    """

    tail_tokens: int = MOST_ROWS

    name: ClassVar[str] = "raise-moe"
    summary: ClassVar[str] = "a router, its experts' products and their weighted sum become moe_experts"
    fusion: ClassVar[bool] = True
    pattern: ClassVar[str] = (
        "a top-k over sigmoid scores plus a bias, of all experts or of the best groups; the picked experts' products "
        "around SwiGLU or SiTU, gathered, grouped or over all experts; their sum weighted by the scores. For a few "
        "tokens also the norm and product behind the sum, and the shared experts added to it"
    )
    constraints: ClassVar[tuple[str, ...]] = (
        "router logits in float32",
        "the bias steers the choice alone, the weights are renormalised and scaled by constants or not",
        "gate and up are the halves of one product",
        "picks, weights and intermediate values are used nowhere else",
        "rows, experts and result of one type: bfloat16, float16 or float32",
        "norm, outward product and shared experts: at most 8 tokens, one activation for all",
    )
    effect: ClassVar[str] = "`moe_experts`"

    def anchors(self, graph: Graph) -> Sequence[Node]:
        """The top-ks of routers."""
        return [node for node in graph.nodes if node.target is ATEN.topk.default and _is_router(node)]

    def check(self, program: CapturedProgram, anchor: Node) -> MoeSite:
        """The experts behind this router."""
        graph = program.graph_module.graph
        try:
            routing = routing_at(anchor)
        except Refused as refusal:
            raise refusal.raised_to(1) from refusal
        try:
            experts = experts_at(routing)
            few = routing.tokens <= self.tail_tokens
            tail = tail_of(experts) if few else Tail(experts.out, apart="more tokens than go into one launch")
            return _checked(graph, routing, experts, tail)
        except Refused as refusal:
            raise refusal.raised_to(2, (routing.logits, routing.weights)) from refusal

    def rewrite(self, program: CapturedProgram, site: MoeSite) -> Node:
        """Put the operator before the last node that vanishes."""
        graph, routing, gating, out = program.graph_module.graph, site.routing, site.experts.gating, site.tail.out
        names = (
            "x",
            "logits",
            "bias",
            "gate_up",
            "down",
            "norm_weight",
            "up",
            "shared_gate",
            "shared_up",
            "shared_down",
        )
        operands = [build(graph, site.operands[name], out) if name in site.operands else None for name in names]
        node = call(
            graph,
            OPERATORS["moe_experts"].overload,
            tuple(operands),
            {
                "picks": routing.each,
                "renormalize": routing.renormalize,
                "scale": routing.scale,
                "groups": routing.groups,
                "group_picks": routing.group_picks,
                "activation": gating.activation,
                "beta": gating.beta,
                "linear_beta": gating.linear_beta,
                "limit": gating.limit,
                "eps": site.tail.eps,
            },
            like=routing.topk,
            before=out,
            replaces=[found for found in site.inside if packet(found) in _NAMED],
        )
        node.meta["selects"] = routing.topk.name
        result = call(graph, operator.getitem, (node, 0), like=out, before=out)
        if shape(out) != shape(result):
            result = call(graph, ATEN.view.default, (result, list(shape(out))), like=out, before=out)
        replace(out, result)
        return node

    def note(self, site: MoeSite) -> str:
        """What stays a product of its own behind the experts."""
        apart = site.tail.apart
        return f"what follows the experts of {site.routing.topk.name} stays apart: {apart}" if apart else ""


def _is_router(node: Node) -> bool:
    try:
        return is_router(node)
    except Refused:
        return False


def _checked(graph: Graph, routing: Routing, experts: RoutedExperts, tail: Tail) -> MoeSite:
    require_type("the router's logits", routing.logits, (torch.float32,))
    require_type("the experts' operand", experts.x, FLOATS)
    if tail.shared is not None and _wide(tail.shared.gate) != _wide(tail.shared.up):
        raise Refused("the experts: gate and up of the shared ones differ in width", tail.shared.up)
    leaves = _leaves(routing, experts, tail)
    inside = _between(tail.out, set(leaves.values()))
    require_unused_elsewhere([node for node in inside if node is not tail.out], list(inside))
    for node in inside:
        if mutated_arguments(node):
            raise Refused(f"the experts: {node.name} writes in place", node)
    operands: dict[str, Operand] = {}
    for name, leaf in leaves.items():
        rows = routing.tokens if name in ("x", "logits", "shared_gate", "shared_up") else None
        sizes = shape(leaf) if rows is None else (rows, shape(leaf)[-1])
        wanted = (routing.count,) if name == "bias" else sizes
        reader = min((user for user in leaf.users if user in inside), default=tail.out)
        operands[name] = Operand(leaf, wanted, reader)
        require_unwritten(graph, f"the operand {name}", operands[name], tail.out)
    return MoeSite(routing, experts, tail, operands, tuple(sorted(inside)))


def _leaves(routing: Routing, experts: RoutedExperts, tail: Tail) -> dict[str, Node]:
    shared = tail.shared
    found = {
        "x": experts.x,
        "logits": routing.logits,
        "bias": routing.bias,
        "gate_up": experts.gate_up,
        "down": experts.down,
        "norm_weight": tail.norm_weight,
        "up": tail.up,
        "shared_gate": None if shared is None else shared.gate,
        "shared_up": None if shared is None else shared.up,
        "shared_down": None if shared is None else shared.down,
    }
    return {name: node for name, node in found.items() if node is not None}


def _between(out: Node, leaves: Iterable[Node]) -> set[Node]:
    """All nodes on the way from the leaves to ``out``, it included."""
    known, waiting, inside = set(leaves), [out], {out}
    while waiting:
        for source in waiting.pop().all_input_nodes:
            if source in known or source in inside:
                continue
            if source.op == "placeholder":
                raise Refused(f"the experts: {source.name} is read beside their operands", source)
            inside.add(source)
            waiting.append(source)
    return inside


def _wide(node: Node) -> int:
    return shape(node)[-1]
