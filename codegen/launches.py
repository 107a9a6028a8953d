"""How many device operations a graph starts: the figure behind ``launches`` of the report."""

from collections.abc import Mapping

import torch
from torch._ops import OpOverload
from torch.fx import Graph, Node

from kimigraph.codegen.request import semantic_operator
from kimigraph.ir.manifest import Manifest
from kimigraph.ir.program import CapturedProgram
from kimigraph.ir.purity import mutated_arguments, storage_root


def count_launches(before: CapturedProgram, after: CapturedProgram, manifest: Manifest) -> dict[str, int]:
    """``launches`` of the report: ``before`` should be the canonicalized graph, ``after`` the one that was built."""
    launches = manifest.launches or graph_launches(after.graph_module.graph)
    return {"before": graph_launches(before.graph_module.graph), "after": launches}


def graph_launches(graph: Graph, kernel_launches: Mapping[str, int] | None = None) -> int:
    """Calls of non-view ATen operators, plus kernel launches of semantic operators.

    ``kernel_launches`` gives the launches of a semantic node by name; one that is absent (a graph without kernels yet)
    counts once. Views, item access and assertions on metadata start nothing on a device.
    """
    return sum(launches_of(node, kernel_launches) for node in graph.nodes)


def is_view(node: Node) -> bool:
    """Whether the call only gives its argument's storage another shape: no kernel runs."""
    root = storage_root(node)
    if root is node or mutated_arguments(node):
        return False
    value, source = node.meta.get("val"), root.meta.get("val")
    if isinstance(value, torch.Tensor) and isinstance(source, torch.Tensor):
        # An operator that may alias (to, type_as) copies when the type changes; view.dtype is the one that does not.
        return value.dtype == source.dtype or node.target is torch.ops.aten.view.dtype
    return True


def launches_of(node: Node, kernel_launches: Mapping[str, int] | None = None) -> int:
    """What one node adds to ``graph_launches``."""
    if node.op == "call_module":
        return 1
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return 0
    if semantic_operator(node) is not None:
        return (kernel_launches or {}).get(node.name, 1)
    if is_view(node) or "_assert_tensor_metadata" in str(node.target) or "sym_" in str(node.target):
        return 0
    return 1
