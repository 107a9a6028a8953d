"""Two halves of a batch on several ranks, in turn: while one is summed over ranks, the other one computes."""

from collections.abc import Sequence

from torch.fx import Graph, Node

from kimigraph.ir.branches import branch_of
from kimigraph.ir.collectives import is_wait
from kimigraph.ir.dependences import Dependence, node_dependences

HALVES = ("half 0", "half 1")
Turn = tuple[int, int]
"""How often a half has waited, and which one it is."""


def alternate_halves(graph: Graph) -> bool:
    """Let the halves take turns at their waits: a piece of the first up to its wait, one of the second, and so on.

    All dependences are kept but those of one half on the other by the memory of a cache, of which they have different
    rows. False, and nothing moves, where a program has no halves, or they take turns already.
    """
    nodes = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
    if {branch_of(node) for node in nodes}.isdisjoint(HALVES):
        return False
    turns = _turns(nodes)
    order = sorted(nodes, key=turns.__getitem__)  # which keeps the order of equals
    if order == nodes:
        return False
    [*_, output] = graph.nodes
    for node in order:
        output.prepend(node)
    return True


def _turns(nodes: Sequence[Node]) -> dict[Node, Turn]:
    """The turn of each node: its half's, and not before that of anything it depends on."""
    waited = [0, 0]
    turns: dict[Node, Turn] = {}
    for node, items in node_dependences(nodes).items():
        own = (-1, 0)
        if branch_of(node) in HALVES:
            half = HALVES.index(branch_of(node))
            waited[half] += is_wait(node)
            own = (waited[half], half)
        turns[node] = max([own, *(turns[item.first] for item in items if item.first in turns and _holds(item))])
    return turns


def _holds(item: Dependence) -> bool:
    """Whether the order of two nodes matters: that of collectives is chosen here, and halves share no rows."""
    if item.kind == "operand":
        return True
    halves = {branch_of(item.first), branch_of(item.second)}
    return item.kind != "order of effects" and not halves.issuperset(HALVES)
