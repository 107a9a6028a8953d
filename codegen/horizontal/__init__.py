"""Horizontal regions: like operators with different operands as one kernel over a table of tiles."""

from torch.fx import GraphModule

from kimigraph.codegen.horizontal import combined, lookup, products
from kimigraph.codegen.kernel import KernelModule

__all__ = ["build_region"]


def build_region(child: GraphModule) -> KernelModule:
    """The kernel of a horizontal region: of pointwise regions and cache writes, of products of the same few rows, or of
    one product of rows that are looked up and normed.

    Raises CompileError where the region holds anything else.
    """
    found = lookup.lookup_of(child)
    if found is not None:
        return lookup.build_lookup(child, found)
    if any(map(combined.is_member, child.graph.nodes)):
        return combined.build_combined(child)
    return products.build_region(child)
