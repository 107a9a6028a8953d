"""What a graph's nodes say to other ranks: which they are, what waits for them, and the order that all ranks keep.

``all_reduce``, ``all_gather_into_tensor`` and ``all_to_all_single`` begin a collective, on a stream of the library's
own; ``wait_tensor`` lets the current stream wait for it. Operators that communicate within (``exchange_picks``) are
done when they return. ``meta["collective"]`` numbers them in the order in which all ranks begin them.
"""

from dataclasses import dataclass

from torch._ops import OpOverload
from torch.fx import Graph, Node

from kimigraph.ir.mesh import COLLECTIVES
from kimigraph.ir.operators import operator_of
from kimigraph.ir.purity import has_effect

NUMBER = "collective"


@dataclass(frozen=True)
class Pair:
    """A collective, and the node that waits for it."""

    start: Node
    wait: Node


def is_wait(node: Node) -> bool:
    """Whether the node waits for a collective."""
    return _name(node) == "wait_tensor"


def is_start(node: Node) -> bool:
    """Whether the node begins a collective that another node waits for."""
    return bool(_name(node)) and not is_wait(node)


def reads_until_wait(node: Node) -> bool:
    """Whether a collective reads its input where it lies until its wait; what is summed is copied first."""
    return _name(node) in ("all_gather_into_tensor", "all_to_all_single")


def is_collective(node: Node) -> bool:
    """Whether ranks must come to this node in one order: it begins a collective, or communicates within."""
    return is_start(node) or (operator_of(node) is not None and has_effect(node))


def collectives(graph: Graph) -> list[Node]:
    """The collectives of a graph, in order."""
    return [node for node in graph.nodes if is_collective(node)]


def number_collectives(graph: Graph) -> int:
    """Number the collectives in the order in which they stand; returns how many there are."""
    found = collectives(graph)
    for number, node in enumerate(found):
        node.meta[NUMBER] = number
    return len(found)


def pairs(graph: Graph) -> list[Pair]:
    """The collectives that one node waits for, and nothing else uses, in order."""
    found: list[Pair] = []
    for node in graph.nodes:
        if is_start(node) and len(node.users) == 1:
            [user] = node.users
            if is_wait(user):
                found.append(Pair(node, user))
    return found


def _name(node: Node) -> str:
    """The name of a functional collective, or of the wait for one; empty for other nodes."""
    if node.op != "call_function" or not isinstance(node.target, OpOverload) or node.target.namespace != COLLECTIVES:
        return ""
    return node.target.overloadpacket.__name__
