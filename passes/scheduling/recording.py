"""The order in which the nodes of a forked segment are recorded, and the fewest waits that keep all dependences."""

from collections.abc import Callable, Mapping, Sequence
from heapq import heapify, heappop, heappush

from torch.fx import Graph, Node

from kimigraph.ir.dependences import Dependence, node_dependences, starts_work
from kimigraph.ir.schedule import Clock, merged, stream_of


def record_main_first(first: Node, closer: Node) -> bool:
    """Reorder the nodes from ``first`` to before ``closer``: what is on stream 0 goes first wherever it can.

    All dependences between nodes are kept. Returns whether anything moved.
    """
    return _record(first, closer, lambda node: float(stream_of(node) > 0))


def record_by_time(first: Node, closer: Node, begins: Mapping[Node, float]) -> bool:
    """As ``record_main_first``, but what begins first goes first: each stream has its nodes in that order."""
    return _record(first, closer, lambda node: begins.get(node, -1.0))


def _record(first: Node, closer: Node, rank: Callable[[Node], float]) -> bool:
    nodes: list[Node] = []
    node = first
    while node is not closer:
        nodes.append(node)
        node = node.next
    order = _ordered(nodes, rank)
    for node in order:
        closer.prepend(node)
    return order != nodes


def _ordered(nodes: Sequence[Node], rank: Callable[[Node], float]) -> list[Node]:
    """An order that keeps all dependences: of what can go next, what has the lowest rank and stands first."""
    place = {node: index for index, node in enumerate(nodes)}
    followers: dict[Node, list[Node]] = {node: [] for node in nodes}
    waiting: dict[Node, int] = {}
    for node, items in node_dependences(nodes).items():
        sources = {item.first for item in items if item.first in place}
        waiting[node] = len(sources)
        for source in sources:
            followers[source].append(node)
    ready = [(rank(node), place[node]) for node in nodes if not waiting[node]]
    heapify(ready)
    order: list[Node] = []
    while ready:
        node = nodes[heappop(ready)[1]]
        order.append(node)
        for follower in followers[node]:
            waiting[follower] -= 1
            if not waiting[follower]:
                heappush(ready, (rank(follower), place[follower]))
    return order


def set_waits(
    graph: Graph, dependences: Mapping[Node, Sequence[Dependence]], joins: Mapping[Node, Sequence[Node]]
) -> None:
    """Give every node the fewest waits that keep its dependences and ``joins`` (what else it is to come after).

    A wait that another one, or an earlier one of the same stream, implies is left out: this is the transitive reduction
    of the waits, taken with vector clocks in one walk.
    """
    count = 1 + max((stream_of(node) for node in graph.nodes), default=0)
    reached: list[Clock] = [(0,) * count] * count
    after: dict[Node, Clock] = {}
    for node in graph.nodes:
        if not starts_work(node) and node.op != "output":
            continue
        stream = stream_of(node)
        wanted = [item.first for item in dependences.get(node, ())] + list(joins.get(node, ()))
        waits, clock = _fewest(wanted, after, reached[stream])
        if waits:
            node.meta["waits"] = tuple(other.name for other in waits)
        clock = (*clock[:stream], clock[stream] + 1, *clock[stream + 1 :])
        reached[stream] = after[node] = clock


def _fewest(wanted: Sequence[Node], after: Mapping[Node, Clock], reached: Clock) -> tuple[list[Node], Clock]:
    """Those of ``wanted`` that ``reached`` and the others do not imply, latest first, and the clock behind all."""
    waits: list[Node] = []
    for node in sorted(set(wanted), key=lambda node: (-sum(after[node]), node.name)):
        stream = stream_of(node)
        if after[node][stream] > reached[stream]:
            waits.append(node)
            reached = merged(reached, after[node])
    return waits, reached
