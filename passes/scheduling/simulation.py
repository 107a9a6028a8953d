"""When each node of a scheduled program begins and ends under the cost model.

As in ``branches``, a kernel has a fixed part, which passes beside other streams' work, and one in which it moves bytes
or computes. Kernels that do so at once share the device equally, so that all together take as long as one by one.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from torch.fx import Graph, Node

from kimigraph.ir.dependences import work_dependences
from kimigraph.ir.device import Device
from kimigraph.ir.schedule import stream_of, waits_of
from kimigraph.passes.scheduling.branches import Duration, duration_of

LEAST = 0.01
"""Microseconds: what takes less is not told."""
_EPSILON = 1e-7


@dataclass(frozen=True)
class Slot:
    """When a node is at work, in microseconds from the begin of the program.

    ``behind`` is the node whose end lets it begin (None: the first one), ``beside`` one on another stream that it had
    to share the device with.
    """

    node: Node
    start: float
    end: float
    duration: Duration
    behind: Node | None
    beside: Node | None


@dataclass
class _Running:
    """A node that has begun: when it comes to move bytes or compute, and microseconds of that which are left.

    ``beside`` is what it shares the device with for longest without a change, ``shared`` for how long.
    """

    node: Node
    start: float
    behind: Node | None
    duration: Duration
    ready: float
    left: float
    beside: Node | None = None
    shared: float = 0.0

    def slot(self, end: float) -> Slot:
        stretched = end - self.ready - self.duration.busy * 1e6
        return Slot(self.node, self.start, end, self.duration, self.behind, self.beside if stretched > LEAST else None)


def planned_slots(graph: Graph, device: Device) -> list[Slot]:
    """The nodes that start work, in the order in which they end."""
    pending: dict[int, list[Node]] = {}
    for node in reversed(work_dependences(graph)):
        pending.setdefault(stream_of(node), []).append(node)
    known = frozenset(node.name for nodes in pending.values() for node in nodes)
    simulation = _Simulation(device, known)
    while any(pending.values()) or simulation.running:
        heads = [(stream, nodes) for stream, nodes in pending.items() if nodes and stream not in simulation.running]
        later = [begin for stream, nodes in heads if (begin := simulation.begin(stream, nodes)) is not None]
        simulation.advance(later)
    return list(simulation.slots.values())


class _Simulation:
    """Time passes from one event to the next: a node begins, comes to the device, or ends."""

    def __init__(self, device: Device, known: frozenset[str]) -> None:
        self.running: dict[int, _Running] = {}
        self.slots: dict[str, Slot] = {}
        self._device, self._known = device, known
        self._last: dict[int, Slot] = {}
        self._now = 0.0

    def begin(self, stream: int, nodes: list[Node]) -> float | None:
        """Start the next node of a free stream if it is time; else when it will be, None when that is not known."""
        node = nodes[-1]
        found = self._begins(node)
        if found is None or found[0] > self._now + _EPSILON:
            return None if found is None else found[0]
        nodes.pop()
        start, behind = found
        duration = duration_of(node, self._device)
        ready = start + duration.fixed * 1e6
        self.running[stream] = _Running(node, start, behind, duration, ready, duration.busy * 1e6)
        return None

    def advance(self, later: Iterable[float]) -> None:
        """Go to the next event, and take out what has ended then."""
        active = [item for item in self.running.values() if item.ready <= self._now + _EPSILON]
        times = [*later, *(item.ready for item in self.running.values() if item.ready > self._now + _EPSILON)]
        times += [self._now + item.left * len(active) for item in active]
        then = min(times)
        for item in active:
            item.left -= (then - self._now) / len(active)
            if len(active) > 1 and then - self._now > item.shared:
                item.beside = next(other.node for other in active if other is not item)
                item.shared = then - self._now
        self._now = then
        for stream, item in list(self.running.items()):
            if item.ready <= then + _EPSILON and item.left <= _EPSILON:
                self.slots[item.node.name] = self._last[stream] = self.running.pop(stream).slot(then)

    def _begins(self, node: Node) -> tuple[float, Node | None] | None:
        """When a node can begin and behind what; None while something that it waits for has not ended."""
        waits = [name for name in waits_of(node) if name in self._known]
        if any(name not in self.slots for name in waits):
            return None
        return max(self._candidates(node, waits, self._last), key=lambda item: item[0], default=(0.0, None))

    def _candidates(
        self, node: Node, waits: Iterable[str], last: Mapping[int, Slot]
    ) -> Iterator[tuple[float, Node | None]]:
        for name in waits:
            yield self.slots[name].end + self._device.event_seconds * 1e6, self.slots[name].node
        own = last.get(stream_of(node))
        if own is not None:
            yield own.end, own.node
