"""Streams, waits and buffers of a program's nodes, and the order that they give.

``assign-streams`` leaves ``meta["stream"]`` (a number; absent: 0, the caller's stream) and ``meta["waits"]`` (names of
nodes on other streams) at a node, ``plan-memory`` leaves ``meta["buffer"]`` (offset and bytes in the arena), and at a
node with several results ``meta["buffers"]``. A program issues its nodes in graph order. Side streams begin behind what
the caller has queued; the waits of the output are what the caller's stream waits for at the end.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from torch.fx import Graph, Node

from kimigraph.ir.branches import branch_of
from kimigraph.ir.cost import work_of
from kimigraph.ir.dependences import starts_work, work_dependences
from kimigraph.ir.device import Device
from kimigraph.ir.errors import CompileError


def stream_of(node: Node) -> int:
    """The stream that the node is queued on; 0 is the caller's."""
    return 0 if node.op in ("placeholder", "output") else int(node.meta.get("stream", 0))


def waits_of(node: Node) -> tuple[str, ...]:
    """The names of the nodes on other streams that this one waits for."""
    return tuple(node.meta.get("waits", ()))


def buffer_of(node: Node) -> tuple[int, int] | None:
    """Offset and bytes of the node's place in the arena, or None when it has none."""
    found = node.meta.get("buffer")
    return None if found is None else (int(found[0]), int(found[1]))


def buffers_of(node: Node) -> tuple[tuple[int, int] | None, ...]:
    """The places of a node's several results in the arena; empty for a node with one result or none there."""
    return tuple(node.meta.get("buffers", ()))


def describe_schedule(node: Node) -> list[str]:
    """For the comment of a printed node: branch, stream if not the caller's, what it waits for, place in the arena."""
    place = buffer_of(node)
    facts = [f"branch {branch_of(node)}"] if branch_of(node) else []
    facts += [f"stream {stream_of(node)}"] if stream_of(node) else []
    facts += [f"waits for {', '.join(waits_of(node))}"] if waits_of(node) else []
    return facts + ([] if place is None else [f"bytes {place[0]} to {sum(place)} of the arena"])


def clear_streams(graph: Graph) -> None:
    """Put every node back on the caller's stream."""
    for node in graph.nodes:
        node.meta.pop("stream", None)
        node.meta.pop("waits", None)


@dataclass(frozen=True)
class Place:
    """Where a node that starts work stands: its stream, and its number there, from 1."""

    stream: int
    number: int


Clock = tuple[int, ...]
"""For each stream, how many of its nodes are done."""


class HappensBefore:
    """Which node is done before which begins, on any run: by the order within streams and by waits.

    Vector clocks: the clock of a node says how many nodes of each stream are done before it begins. ``end`` is the
    clock of the caller's stream when the program returns. Nodes that start no work are not asked about.
    """

    def __init__(self, graph: Graph) -> None:
        nodes = list(graph.nodes)
        self.count = 1 + max((stream_of(node) for node in nodes), default=0)
        self.places: dict[Node, Place] = {}
        self.clocks: dict[Node, Clock] = {}
        self._reached: list[Clock] = [(0,) * self.count] * self.count
        self.end: Clock = (0,) * self.count
        self._walk(nodes)

    def ordered(self, first: Node, second: Node) -> bool:
        """Whether ``first`` is always done before ``second`` begins."""
        place = self.places[first]
        return self.clocks[second][place.stream] >= place.number

    def numbers(self) -> Clock:
        """How many nodes each stream has in all."""
        return tuple(clock[stream] for stream, clock in enumerate(self._reached))

    def _walk(self, nodes: Iterable[Node]) -> None:
        queued: dict[str, Clock] = {}
        for node in nodes:
            stream = stream_of(node)
            clock = self._reached[stream]
            for name in waits_of(node):
                if name not in queued:
                    raise _not_queued(node, name)
                clock = merged(clock, queued[name])
            if node.op == "output":
                self.end = clock
                break
            if starts_work(node):
                self.clocks[node] = clock
                self.places[node] = Place(stream, clock[stream] + 1)
                clock = (*clock[:stream], clock[stream] + 1, *clock[stream + 1 :])
            self._reached[stream] = clock
            queued[node.name] = (0,) * self.count if node.op == "placeholder" else clock


def merged(first: Clock, second: Clock) -> Clock:
    """The clock of what comes after both."""
    return tuple(map(max, first, second))


@dataclass(frozen=True)
class ScheduleSummary:
    """A schedule in figures: the streams in use, the events that order them, and times under the cost model.

    ``critical_path_us`` is the longest chain of dependent nodes, which no schedule undercuts; ``serial_us`` is one
    stream.
    """

    count: int
    events: int
    critical_path_us: float
    serial_us: float


def summarize(graph: Graph, device: Device) -> ScheduleSummary:
    """The figures of the schedule that the graph's nodes carry."""
    finished: dict[Node, float] = {}
    serial = 0.0
    for node, dependences in work_dependences(graph).items():
        seconds = work_of(node).seconds(device)
        serial += seconds
        finished[node] = seconds + max((finished[item.first] for item in dependences), default=0.0)
    streams = {stream_of(node) for node in finished}
    events = {name for node in graph.nodes for name in waits_of(node)}
    return ScheduleSummary(
        count=max(len(streams), 1),
        events=len(events),
        critical_path_us=round(max(finished.values(), default=0.0) * 1e6, 3),
        serial_us=round(serial * 1e6, 3),
    )


def _not_queued(node: Node, name: str) -> CompileError:
    return CompileError(
        f"node {node.name} on stream {stream_of(node)} waits for {name}, which is not queued before it: "
        "the wait would never end or order nothing; --disable-pass assign-streams compiles for one stream"
    )
