"""Operators that no pass knows: they stay in the graph as they are, and the report says so."""

from torch._ops import OpOverload
from torch.fx import Graph

from kimigraph.ir.provenance import source_line
from kimigraph.ir.remarks import Remark

_KNOWN_NAMESPACES = ("aten", "prims", "kimigraph", "_c10d_functional")


def foreign_operators(graph: Graph, pass_name: str) -> list[Remark]:
    """One note for each operator of another namespace, with the nodes that call it."""
    calls: dict[str, list[str]] = {}
    first: dict[str, str] = {}
    for node in graph.nodes:
        if isinstance(node.target, OpOverload) and node.target.namespace not in _KNOWN_NAMESPACES:
            name = str(node.target)
            calls.setdefault(name, []).append(node.name)
            first.setdefault(name, source_line(node))
    return [
        Remark(
            "note",
            pass_name,
            f"{name} is known to no pass and stays as it is; programs need the library that registers it",
            nodes[0],
            first[name],
            tuple(nodes),
        )
        for name, nodes in calls.items()
    ]
