"""What a call allocates while it runs, in the order in which it asks: what a memory plan has to place.

``meta["allocations"]`` of a node says it for calls that take memory which is given to them; ``meta["outside"]`` says
why a call makes its own. A graph without either is planned as if every result could be placed and nothing had scratch.
"""

from dataclasses import dataclass

from torch.fx import Graph, Node


@dataclass(frozen=True)
class Allocation:
    """Memory that a call asks for: ``result`` is the number of the result that lies there, None: scratch."""

    nbytes: int
    result: int | None = None


def allocations_of(node: Node) -> tuple[Allocation, ...] | None:
    """What the call asks for, or None where nobody said."""
    return node.meta.get("allocations")


def scratch_of(node: Node) -> list[Allocation]:
    """What the call needs while it runs and leaves to nobody."""
    return [item for item in allocations_of(node) or () if item.result is None and item.nbytes]


def outside(node: Node, result: int) -> str:
    """Why a result of the call cannot lie in memory that is given; empty where it can."""
    if "outside" in node.meta:
        return str(node.meta["outside"])
    found = allocations_of(node)
    if found is None or any(item.result == result for item in found):
        return ""
    return f"{node.name} asks for no memory for it"


def takes_memory(graph: Graph) -> bool:
    """Whether the calls of the graph say what they allocate, so that a program can give them their places."""
    return any("allocations" in node.meta for node in graph.nodes)
