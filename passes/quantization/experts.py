"""Weights of routed experts as MXFP4: packed once, when the program is bound, and read as codes by their kernel."""

from collections.abc import Mapping

import torch
from torch.fx import Graph, Node

from kimigraph.ir.operators import OPERATORS
from kimigraph.ir.program import InputSpec
from kimigraph.ir.reference.mxfp4_quantize import GROUP
from kimigraph.passes.algebra.nodes import argument, shape
from kimigraph.passes.algebra.refusal import Refused
from kimigraph.passes.algebra.rewrite import call

EXPERTS = OPERATORS["moe_experts"].overload
WEIGHTS = ("gate_up", "down")
_WORDS = 16
"""Bytes that kernels read at a time: they divide the scales of a matrix."""


def experts_of(graph: Graph) -> list[Node]:
    """The experts whose weights are real numbers."""
    nodes = [node for node in graph.nodes if node.target is EXPERTS]
    return [node for node in nodes if argument(node, WEIGHTS[0]).meta["val"].dtype != torch.uint8]


def check_experts(node: Node, specs: Mapping[str, InputSpec]) -> None:
    """Refused unless both weights are the model's own, read here alone, and of sizes that the kernel's words divide."""
    if argument(node, "x").meta["val"].dtype == torch.float16:
        raise Refused("the experts' rows are float16, which MXFP4 weights exceed", node)
    for name in WEIGHTS:
        weight = argument(node, name)
        spec = specs.get(weight.name)
        if spec is None or spec.kind != "weight" or spec.mutated:
            raise Refused(f"the experts' {name} is no weight of the model as it lies", weight)
        others = [user.name for user in weight.users if user is not node]
        if others:
            raise Refused(f"the experts' {name} is read by {others[0]}, too", weight)
        rows, columns = shape(weight)[-2:]
        if columns % GROUP or rows * (columns // GROUP) % _WORDS:
            raise Refused(f"the experts' {name} [{rows}, {columns}] does not divide into words of MXFP4", weight)


def pack_experts(graph: Graph, node: Node) -> tuple[Node, int, int]:
    """Experts beside those that ``check_experts`` passed, on packed weights; bytes of both weights before and now."""
    before = after = 0
    changed: dict[Node, Node] = {}
    for name in WEIGHTS:
        weight = argument(node, name)
        packed = call(graph, OPERATORS["mxfp4_quantize"].overload, (weight,), like=node, before=node)
        packed.meta["prepared"] = True
        changed[weight] = packed
        before += weight.meta["val"].nbytes
        after += packed.meta["val"].nbytes
    args = tuple(changed.get(one, one) if isinstance(one, Node) else one for one in node.args)
    return call(graph, EXPERTS, args, node.kwargs, like=node, before=node, replaces=[node]), before, after
