"""Regions of a graph as kernels: which kinds can be built, and what one costs."""

from collections.abc import Callable, Iterable, Iterator

from torch.fx import GraphModule, Node

from kimigraph.codegen import horizontal
from kimigraph.codegen.kernel import KernelModule
from kimigraph.codegen.pointwise import build_region
from kimigraph.codegen.request import call_cost, semantic_operator
from kimigraph.ir.cost import fused_work
from kimigraph.ir.errors import CompileError
from kimigraph.ir.operators.registry import Cost
from kimigraph.ir.purity import region_module

BUILDERS: dict[str, Callable[[GraphModule], KernelModule]] = {
    "pointwise": build_region,
    "horizontal": horizontal.build_region,
}
"""What makes the kernel of a region, by its kind."""

_PASSES = {"pointwise": "fuse-pointwise", "horizontal": "merge-horizontal", "chain": "merge-superkernels"}


def kernel_kind(node: Node) -> str | None:
    """What a node's kernel is called: its semantic operator or the kind of its region; None where it has none."""
    if node.op == "call_module":
        return str(node.meta.get("region") or "region")
    return semantic_operator(node)


def kernel_cost(node: Node) -> Cost:
    """Bytes and FLOPs of a node that has a kernel."""
    child = region_module(node) if node.op == "call_module" else None
    if child is None:
        return call_cost(node)
    work = fused_work(list(child.graph.nodes))
    return Cost(work.bytes, work.total_flops)


def build_region_kernel(node: Node) -> KernelModule:
    """The kernel of a region; CompileError names the pass to leave out where it cannot be built."""
    kind, child = str(kernel_kind(node)), region_module(node)
    if kind not in BUILDERS or child is None:
        raise CompileError(
            f"node {node.name} is a {kind} region, and no kernel can be generated for it yet: compile with"
            f" --disable-pass {_PASSES.get(kind, 'NAME of the pass that made it')}"
        )
    return BUILDERS[kind](child)


def operators_within(nodes: Iterable[Node]) -> Iterator[str]:
    """The semantic operators that nodes call, those inside regions too."""
    for node in nodes:
        child = region_module(node) if node.op == "call_module" else None
        if child is not None:
            yield from operators_within(child.graph.nodes)
        elif operator := semantic_operator(node):
            yield operator
