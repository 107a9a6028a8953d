"""Horizontal regions: like operators with different operands as one kernel over a table of tiles."""

from torch.fx import GraphModule

from kimigraph.codegen.horizontal import combined, products
from kimigraph.codegen.kernel import KernelModule

__all__ = ["build_region"]


def build_region(child: GraphModule) -> KernelModule:
    """The kernel of a horizontal region: of pointwise regions, or of products of the same few rows.

    Raises CompileError where the region holds anything else.
    """
    if any(node.op == "call_module" for node in child.graph.nodes):
        return combined.build_combined(child)
    return products.build_region(child)
