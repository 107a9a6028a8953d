"""Horizontal products whose rows an operation prepares that may do so in their kernel: open while regions grow."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.fx import GraphModule, Node

from kimigraph.ir.pointwise.products import is_preparation
from kimigraph.ir.regions import extract_region, inline_region
from kimigraph.passes.algebra.dependences import make_neighbours


@dataclass(frozen=True)
class Opened:
    """The nodes of a horizontal region while they stand in the graph, and what the call of it was."""

    name: str
    nodes: tuple[Node, ...]
    meta: dict[str, Any]

    def close(self, graph_module: GraphModule) -> Node:
        """Make the region again."""
        make_neighbours(list(self.nodes))
        call = extract_region(graph_module, self.nodes, self.name, "horizontal")
        call.meta.update(
            {key: self.meta[key] for key in ("replaces", "stack_trace", "nn_module_stack") if key in self.meta}
        )
        return call


def open_regions(graph_module: GraphModule, fits: Callable[[Node], bool]) -> list[Opened]:
    """Put the nodes of those horizontal regions into the graph whose first operand is prepared and ``fits``."""
    found: list[Opened] = []
    for call in list(graph_module.graph.nodes):
        rows = call.args[0] if call.op == "call_module" and call.meta.get("region") == "horizontal" else None
        if isinstance(rows, Node) and is_preparation(rows) and fits(rows):
            name, meta = str(call.target), dict(call.meta)
            found.append(Opened(name, tuple(inline_region(graph_module, call)), meta))
    return found
