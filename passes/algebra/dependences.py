"""Moving nodes that do not wait for one another together. What waits for what: ``kimigraph.ir.dependences``."""

from collections.abc import Collection

from torch.fx import Node

from kimigraph.ir.dependences import Dependences


def make_neighbours(nodes: Collection[Node]) -> None:
    """Move nodes so that ``nodes``, between which there is no path, stand next to each other, in their old order.

    What they wait for goes before them, the rest of what stood between them stays behind; both keep their order. Only
    what stands between them is looked at: a pass may do this once a layer.
    """
    members = sorted(set(nodes))
    place, first = members[-1], members[0]
    dependences = Dependences.between(first, place)
    between: list[Node] = []
    node = first.next
    while node is not place:
        between.append(node)
        node = node.next
    for other in between:
        if other not in members and any(dependences.precedes(other, member) for member in members):
            first.prepend(other)
    for member in reversed(members[1:]):
        first.append(member)
