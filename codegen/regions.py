"""Regions of a graph as kernels: which kinds can be built, and what one costs."""

from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any, cast

import torch
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


def region_key(node: Node) -> Hashable:
    """What the kernel of a region follows from: kind, operators, arguments and forms of values; names are left out."""
    child = region_module(node)
    return kernel_kind(node), None if child is None else _content(child)


def _content(graph_module: GraphModule) -> Hashable:
    nodes = list(graph_module.graph.nodes)
    position = {node: number for number, node in enumerate(nodes)}
    inner = (region_module(node) if node.op == "call_module" else None for node in nodes)
    return tuple(
        (
            node.op,
            _operation(node) if child is None else _content(child),
            _key(node.args, position),
            _key(node.kwargs, position),
            _form(node.meta.get("val")),
            bool(node.meta.get("prepared")),
        )
        for node, child in zip(nodes, inner, strict=True)
    )


def _operation(node: Node) -> Hashable:
    return None if node.op == "placeholder" else node.target


def _key(value: Any, position: dict[Node, int]) -> Hashable:
    if isinstance(value, Node):
        return position[value]
    if isinstance(value, list | tuple):
        return tuple(_key(item, position) for item in cast("Iterable[Any]", value))
    if isinstance(value, dict):
        return tuple((name, _key(item, position)) for name, item in cast("dict[str, Any]", value).items())
    return type(value), repr(value)


def _form(value: Any) -> Hashable:
    if isinstance(value, torch.Tensor):
        return value.dtype, tuple(value.shape), value.stride(), value.storage_offset()
    return tuple(_form(item) for item in cast("Iterable[Any]", value)) if isinstance(value, list | tuple) else None


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
