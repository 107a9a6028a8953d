"""Where a program is as narrow as one node: only what stands between two such places can run in parallel."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch.fx import Node

from kimigraph.ir.dependences import Dependence


@dataclass(frozen=True)
class Segment:
    """Nodes between two that are ordered with all others; ``closer`` comes after all of them (None: the output)."""

    nodes: tuple[Node, ...]
    closer: Node | None


def segments(dependences: dict[Node, list[Dependence]]) -> list[Segment]:
    """The segments of more than one node, in order.

    A node without predecessors counts as ordered behind the node before it, and one that nothing waits for as ordered
    before the next: such a node runs somewhere beside its neighbours, not anywhere in the program. Sets of nodes are
    bits of integers.
    """
    nodes = list(dependences)
    before = _before(nodes, dependences)
    found: list[Segment] = []
    opened = 0
    for place in _narrow_places(before):
        if place - opened > 1:
            found.append(Segment(tuple(nodes[opened:place]), nodes[place]))
        opened = place + 1
    if len(nodes) - opened > 1:
        found.append(Segment(tuple(nodes[opened:]), None))
    return found


def _before(nodes: Sequence[Node], dependences: dict[Node, list[Dependence]]) -> list[int]:
    place = {node: index for index, node in enumerate(nodes)}
    awaited = {item.first for items in dependences.values() for item in items}
    before: list[int] = []
    for index, node in enumerate(nodes):
        waits = 0
        for item in dependences[node]:
            waits |= before[place[item.first]] | 1 << place[item.first]
        if index and (not dependences[node] or nodes[index - 1] not in awaited):
            waits |= before[index - 1] | 1 << index - 1
        before.append(waits)
    return before


def _narrow_places(before: Sequence[int]) -> list[int]:
    """The places that all earlier ones precede and that precede all later ones."""
    common, found = -1, list[int]()
    for index in range(len(before) - 1, -1, -1):
        if common >> index & 1 and before[index].bit_count() == index:
            found.append(index)
        common &= before[index]
    return found[::-1]
