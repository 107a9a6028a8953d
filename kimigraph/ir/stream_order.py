"""What has ended when a node starts: the order that streams and events give, and nothing else.

A node's ``meta["stream"]`` is the number of its stream, 0 (the caller's) where it has none; ``meta["waits"]`` names
nodes of other streams whose end it waits for. Work of one stream runs in the order of the graph; all streams begin
behind what the caller's did before the step and are joined at its end.
"""

from bisect import bisect_left
from functools import reduce
from operator import or_

from torch.fx import Graph, Node

from kimigraph.ir.dependences import starts_work
from kimigraph.ir.errors import CompileError
from kimigraph.ir.schedule import stream_of, waits_of


class StreamOrder:
    """Which work of a graph has ended when other work starts. Sets of nodes are bits of integers.

    Only nodes that start work take part; what a view of their results waits for, it waits for through them. Raises
    CompileError where a node waits for one that does not stand before it.
    """

    def __init__(self, graph: Graph) -> None:
        self.work = [node for node in graph.nodes if starts_work(node)]
        self.position = {node: index for index, node in enumerate(self.work)}
        self._before: dict[Node, int] = {}
        self._waits: list[list[int]] = []
        known = {node.name: node for node in self.work}
        last: dict[int, Node] = {}
        for node in self.work:
            direct = [last[stream_of(node)]] if stream_of(node) in last else []
            direct += [_found(name, known, self._before, node) for name in waits_of(node)]
            self._before[node] = reduce(or_, (self.until(other) for other in direct), 0)
            self._waits.append([self.position[other] for other in direct])
            last[stream_of(node)] = node
        self._after = self._reversed()
        self._last = last
        self._members: dict[int, list[int]] = {}
        for node in self.work:
            self._members.setdefault(stream_of(node), []).append(self.position[node])

    @property
    def streams(self) -> int:
        """How many streams have work."""
        return len({stream_of(node) for node in self.work})

    def bit(self, node: Node) -> int:
        """The set of this node alone."""
        return 1 << self.position[node]

    def before(self, node: Node) -> int:
        """What has ended when ``node`` starts."""
        return self._before[node]

    def until(self, node: Node) -> int:
        """The same and ``node`` itself."""
        return self._before[node] | self.bit(node)

    def since(self, node: Node) -> int:
        """``node`` and what starts only when it has ended."""
        return self._after[self.position[node]] | self.bit(node)

    def done_everywhere(self, node: Node) -> int:
        """What has ended when ``node`` starts, or any that stands behind it in the order of the graph."""
        place = self.position[node]
        done = -1
        for stream, last in self._last.items():
            if self.position[last] >= place:
                earlier = self._latest(stream, place)
                done &= 0 if earlier is None else self.until(earlier)
        return max(done, 0)

    def _latest(self, stream: int, place: int) -> Node | None:
        """The last node of a stream that stands before ``place``."""
        members = self._members[stream]
        number = bisect_left(members, place)
        return self.work[members[number - 1]] if number else None

    def _reversed(self) -> list[int]:
        after = [0] * len(self.work)
        for index in range(len(self.work) - 1, -1, -1):
            for earlier in self._waits[index]:
                after[earlier] |= after[index] | (1 << index)
        return after


def _found(name: str, known: dict[str, Node], done: dict[Node, int], node: Node) -> Node:
    other = known.get(name)
    if other is None or other not in done:
        raise CompileError(
            f"node {node.name} waits for {name}, which does not start work before it: compile with --streams 1"
        )
    return other
