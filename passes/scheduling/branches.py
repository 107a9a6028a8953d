"""List scheduling of one segment: which node goes to which stream, and when it is done under the cost model.

The model: a kernel costs a fixed part (its launch, the wait for its predecessor's result), which other streams hide,
and a part in which it moves bytes or computes, which they do not: the device gives all of itself to one kernel or a
part to each. So branches gain their fixed parts, and the tails that the model does not know.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch.fx import Node

from kimigraph.ir.cost import work_of
from kimigraph.ir.dependences import Dependence, is_one_at_a_time
from kimigraph.ir.device import Device
from kimigraph.ir.purity import has_effect

FILLS_DEVICE = 2e-6
"""Seconds of moving or computing from which a kernel leaves no room beside it; measured (docs/schedule.md)."""


@dataclass(frozen=True)
class Duration:
    """Seconds of a node: ``fixed`` passes beside other streams' work, ``busy`` does not."""

    fixed: float
    busy: float

    @property
    def seconds(self) -> float:
        """On one stream."""
        return self.fixed + self.busy

    @property
    def fills_device(self) -> bool:
        """Whether two such kernels at once would share the device without a gain."""
        return self.busy > FILLS_DEVICE


def duration_of(node: Node, device: Device) -> Duration:
    """The duration of a node that starts work, by the cost model."""
    work = work_of(node)
    fixed = work.launches * (device.launch_seconds + device.latency_seconds)
    return Duration(fixed, work.seconds(device) - fixed)


@dataclass(frozen=True)
class Placement:
    """Streams of a segment's nodes; seconds on one stream, from its begin until the main stream has joined the others,
    and until each node begins."""

    streams: Mapping[Node, int]
    serial: float
    seconds: float
    begins: Mapping[Node, float]

    @property
    def aside(self) -> list[Node]:
        """The nodes on other streams than the main one."""
        return [node for node, stream in self.streams.items() if stream]


@dataclass(frozen=True)
class Costs:
    """What a placement goes by: durations, seconds of a wait across streams, and the nodes that stay on stream 0."""

    durations: Mapping[Node, Duration]
    event_seconds: float
    pinned: frozenset[Node] = frozenset()


def costs_of(nodes: Sequence[Node], device: Device) -> Costs:
    """What the cost model says of the nodes of a segment: those that fill the device stay on the caller's stream."""
    durations = {node: duration_of(node, device) for node in nodes}
    large = frozenset(node for node in nodes if durations[node].fills_device)
    return Costs(durations, device.event_seconds, bound_to_caller(nodes) | large)


def bound_to_caller(nodes: Sequence[Node]) -> frozenset[Node]:
    """The nodes that stay on the caller's stream: there they keep one order for nothing."""
    return frozenset(node for node in nodes if has_effect(node) or is_one_at_a_time(node))


def best_placement(
    nodes: Sequence[Node], dependences: Mapping[Node, Sequence[Dependence]], costs: Costs, count: int
) -> Placement:
    """The fastest placement on up to ``count`` streams; among equals that with the fewest."""
    tried = [place_on_streams(nodes, dependences, costs, number) for number in range(2, count + 1)]
    return min(tried, key=lambda placement: placement.seconds)


def on_one_stream(nodes: Sequence[Node], costs: Costs) -> float:
    """Seconds of the segment on one stream."""
    return sum(costs.durations[node].seconds for node in nodes)


def place_on_streams(
    nodes: Sequence[Node], dependences: Mapping[Node, Sequence[Dependence]], costs: Costs, count: int
) -> Placement:
    """The nodes of a segment on at most ``count`` streams, each where it is done first; longest remaining path first.

    The longest path goes to stream 0. In a tie a node stays where what it waits for ran, so that no event is needed.
    """
    inside = set(nodes)
    waits = {node: [item.first for item in dependences[node] if item.first in inside] for node in nodes}
    remaining = _remaining(nodes, waits, costs)
    place = {node: index for index, node in enumerate(nodes)}
    streams: dict[Node, int] = {}
    done: dict[Node, float] = {}
    begins: dict[Node, float] = {}
    free, device_free = [0.0] * count, 0.0
    for node in sorted(nodes, key=lambda node: (-remaining[node], place[node])):
        duration = costs.durations[node]
        best: tuple[float, int, int, float] | None = None
        for stream in range(1 if node in costs.pinned else count):
            ready = max(
                (done[other] + (costs.event_seconds if streams[other] != stream else 0.0) for other in waits[node]),
                default=costs.event_seconds if stream else 0.0,
            )
            start = max(free[stream], ready)
            finish = max(start + duration.fixed, device_free) + duration.busy
            events = sum(streams[other] != stream for other in waits[node])
            best = min(best or (finish, events, stream, start), (finish, events, stream, start))
        assert best is not None
        finish, _, stream, begins[node] = best
        streams[node], done[node], free[stream] = stream, finish, finish
        if duration.busy:
            device_free = finish
    joined = max(time + (costs.event_seconds if stream and time else 0.0) for stream, time in enumerate(free))
    return Placement({node: streams[node] for node in nodes}, on_one_stream(nodes, costs), joined, begins)


def _remaining(nodes: Sequence[Node], waits: Mapping[Node, Sequence[Node]], costs: Costs) -> dict[Node, float]:
    """Seconds of the longest path from each node to the end of the segment, itself included."""
    after = dict.fromkeys(nodes, 0.0)
    for node in reversed(nodes):
        after[node] += costs.durations[node].seconds
        for other in waits[node]:
            after[other] = max(after[other], after[node])
    return after
