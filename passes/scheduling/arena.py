"""Memory that is used again while it may still be read: the plan of an arena against the order of a program."""

import operator
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Graph, Node

from kimigraph.ir.dependences import starts_work
from kimigraph.ir.launch_memory import scratch_of
from kimigraph.ir.memory_plan import scratch_places
from kimigraph.ir.purity import alias_source, mutated_arguments
from kimigraph.ir.schedule import HappensBefore, buffer_of, buffers_of
from kimigraph.passes.scheduling.races import Violation, missing_edge

_NO_ARENA = "--disable-pass plan-memory compiles without an arena"


Unit = tuple[Node, int | None]
"""A tensor of the arena: the node that writes it first, and which of several results it is; below 0: its scratch."""


def memory_violations(graph: Graph, order: HappensBefore) -> Iterator[Violation]:
    """Planned tensors that get bytes which an earlier one may still need, and buffers that cannot be.

    A buffer is used by every node that reads or writes it or a view of it; what is returned is used until the end. In
    the order in which they are written, each buffer is held against those that had its bytes last: what came before
    them is done when they are written, or was reported then. So the walk is near linear.
    """
    uses = _Uses(graph, order)
    yield from uses.faults
    index = {node: number for number, node in enumerate(graph.nodes)}
    held = _Ranges()
    for unit in sorted(uses.planned, key=lambda unit: (index[unit[0]], unit[1] or 0)):
        start, size = uses.planned[unit]
        for other in held.take(start, start + size, unit):
            late = uses.late(other, unit[0])
            if late is not None:
                use = "returns it" if late.op == "output" else "still uses it"
                reason = (
                    f"{_called(unit)} is written to bytes {start} to {start + size} of the arena, which hold"
                    f" {_called(other)}, and {late.name} {use}"
                )
                yield missing_edge(late, unit[0], reason, _NO_ARENA)


class _Uses:
    """Who uses each planned tensor, through views, items and results in place.

    ``planned`` has the place of each. Of its users the last on each stream are kept.
    """

    def __init__(self, graph: Graph, order: HappensBefore) -> None:
        self.planned: dict[Unit, tuple[int, int]] = {}
        self.faults: list[Violation] = []
        self._order = order
        self._owner: dict[Node, Unit | None] = {}
        self._last: dict[Unit, dict[int, Node]] = {}
        self._returned: dict[Unit, Node] = {}
        for node in graph.nodes:
            for number, place in enumerate(buffers_of(node)):
                if place is not None:
                    self._plan((node, number), place, _extent(node.meta["val"][number]))
            self._plan_scratch(node)
            self._owner[node] = self._find_owner(node)
        for node in graph.nodes:
            for touched in (node, *node.all_input_nodes) if starts_work(node) or node.op == "output" else ():
                self._use(self._owner[touched], node)

    def late(self, planned: Unit, writer: Node) -> Node | None:
        """A user of the tensor that may not be done when ``writer`` begins, or None."""
        if planned in self._returned:
            return self._returned[planned]
        users = self._last[planned].values()
        return next((user for user in users if not self._order.ordered(user, writer)), None)

    def _use(self, planned: Unit | None, user: Node) -> None:
        if planned is None:
            return
        if user.op == "output":
            self._returned[planned] = user
        else:
            self._last[planned][self._order.places[user].stream] = user

    def _find_owner(self, node: Node) -> Unit | None:
        """The planned tensor in whose bytes the value of ``node`` lies, or None when it lies outside the arena."""
        place, source = buffer_of(node), _shared_with(node)
        unit, owner = _unit(node), None
        if source is not None:
            owner = self._owner[source]
        elif unit in self.planned:
            owner = unit
        elif place is None:
            return None
        elif starts_work(unit[0]):
            self._plan(unit, place, _extent(node.meta.get("val")))
            return unit
        if place is not None and (owner is None or not _within(place, self.planned[owner])):
            lies = "is not computed by the step" if source is None else f"lies in the memory of {source.name}"
            self._fault(node, f"{node.name} {lies} and can have no buffer of its own")
        return owner

    def _plan_scratch(self, node: Node) -> None:
        found, asked = scratch_places(node), scratch_of(node)
        if found and len(found) != len(asked):
            self._fault(node, f"{node.name} asks for {len(asked)} pieces of scratch, and {len(found)} are planned")
        for number, (place, item) in enumerate(zip(found, asked, strict=False)):
            self._plan((node, ~number), place, item.nbytes)

    def _plan(self, unit: Unit, place: tuple[int, int], needed: int) -> None:
        if place[0] < 0 or place[1] < needed:
            self._fault(unit[0], f"{_called(unit)} takes {needed} bytes, and the arena has {place[1]} at {place[0]}")
        self.planned[unit], self._last[unit] = place, {}
        self._use(unit, unit[0])

    def _fault(self, node: Node, text: str) -> None:
        self.faults.append(Violation(node, text, _NO_ARENA))


class _Ranges:
    """Disjoint ranges of bytes and who had them last."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._owners: list[Unit] = []

    def take(self, start: int, end: int, owner: Unit) -> list[Unit]:
        """Give ``start`` to ``end`` to ``owner``; returns who had any of it."""
        if start >= end:
            return []
        low, high = bisect_right(self._ends, start), bisect_left(self._starts, end)
        owners = self._owners[low:high]
        kept = [(start, end, owner)]
        if owners and self._starts[low] < start:
            kept.insert(0, (self._starts[low], start, owners[0]))
        if owners and self._ends[high - 1] > end:
            kept.append((end, self._ends[high - 1], owners[-1]))
        self._starts[low:high] = [item[0] for item in kept]
        self._ends[low:high] = [item[1] for item in kept]
        self._owners[low:high] = [item[2] for item in kept]
        return list(dict.fromkeys(owners))


def _shared_with(node: Node) -> Node | None:
    """The argument in whose memory the value of ``node`` lies; an operator that copied after all shares none."""
    source = alias_source(node)
    copies = starts_work(node) and node.op != "call_module" and not mutated_arguments(node)
    return None if copies else source


def _unit(node: Node) -> Unit:
    """The tensor that a node stands for: its own result, or one of several that it takes."""
    if node.target is not operator.getitem:
        return node, None
    container: Any = node.args[0]
    index: Any = node.args[1]
    return (container, index) if isinstance(container, Node) else (node, None)


def _called(unit: Unit) -> str:
    name, number = unit[0].name, unit[1]
    if number is None:
        return name
    return f"{name}[{number}]" if number >= 0 else f"{name} scratch {~number}"


def _within(place: tuple[int, int], outer: tuple[int, int]) -> bool:
    return outer[0] <= place[0] and sum(place) <= sum(outer)


def _extent(value: Any) -> int:
    """The bytes from the first to the last element of a tensor; 0 for what is none or has no fixed size."""
    if not isinstance(value, torch.Tensor):
        return 0
    sizes: tuple[Any, ...] = (*value.shape, *value.stride())
    if any(isinstance(size, torch.SymInt) for size in sizes) or 0 in value.shape:
        return 0
    last = sum((size - 1) * step for size, step in zip(value.shape, value.stride(), strict=True))
    return (last + 1) * value.element_size()
