"""The planned schedule of a program as a timeline: when each node is at work, and what it waits for, and why."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch.fx import Graph, Node

from kimigraph.ir.branches import branch_of
from kimigraph.ir.cost import work_of
from kimigraph.ir.dependences import Dependence, work_dependences
from kimigraph.ir.device import Device
from kimigraph.ir.provenance import module_path, source_line
from kimigraph.ir.schedule import HappensBefore, stream_of, waits_of
from kimigraph.ir.trace import BUBBLE, Span, Track
from kimigraph.passes.scheduling.simulation import LEAST, Slot, planned_slots


def planned_track(graph: Graph, device: Device) -> Track:
    """The timeline of a program as its nodes' streams and waits have it."""
    dependences, order = work_dependences(graph), HappensBefore(graph)
    spans: list[Span] = []
    place: dict[str, int] = {}
    until: dict[int, float] = {}
    slots = sorted(planned_slots(graph, device), key=lambda slot: slot.start)
    for slot in slots:
        stream, idle = stream_of(slot.node), slot.start - until.get(stream_of(slot.node), 0.0)
        if idle > LEAST and slot.behind is not None:
            facts = {"node": slot.node.name, "waits for": slot.behind.name, "stream": stream_of(slot.behind)}
            spans.append(Span(f"waits for {slot.behind.name}", stream, slot.start - idle, idle, BUBBLE, facts))
        until[stream] = slot.end
        place[slot.node.name] = len(spans)
        spans.append(
            Span(slot.node.name, stream, slot.start, slot.end - slot.start, facts=_facts(slot, dependences, order))
        )
    arrows = [(place[name], place[slot.node.name]) for slot in slots for name in waits_of(slot.node) if name in place]
    lanes = {stream: "stream 0, the caller's" if not stream else f"stream {stream}" for stream in until}
    title = f"planned, by the cost model of {device.name}"
    return Track(title, lanes, tuple(spans), tuple(arrows), {"device": device.name, "streams": len(lanes)})


def _facts(slot: Slot, dependences: Mapping[Node, Sequence[Dependence]], order: HappensBefore) -> dict[str, Any]:
    node, work = slot.node, work_of(slot.node)
    facts: dict[str, Any] = {
        "node": node.name,
        "operator": str(node.target),
        "module": module_path(node),
        "source": source_line(node),
        "branch": branch_of(node),
        "launch_us": round(slot.duration.fixed * 1e6, 3),
        "busy_us": round(slot.duration.busy * 1e6, 3),
        "bytes": work.bytes,
        "behind": "" if slot.behind is None else slot.behind.name,
        "beside": "" if slot.beside is None else slot.beside.name,
        "waits": [_wait(item, node, order) for item in dependences[node]],
    }
    return {key: value for key, value in facts.items() if value not in ("", [])}


def _wait(item: Dependence, node: Node, order: HappensBefore) -> dict[str, str]:
    """One thing that a node waits for: which node, why, and what keeps the order."""
    storage = "" if item.storage is None or item.kind == "operand" else item.storage.name
    first = item.first
    if stream_of(first) == stream_of(node):
        kept = "the order of its own stream"
    elif first.name in waits_of(node):
        kept = f"an event on stream {stream_of(first)}"
    else:
        kept = "other waits" if order.ordered(first, node) else "nothing"
    found = {"for": first.name, "why": item.kind, "storage": storage, "kept by": kept}
    return {key: value for key, value in found.items() if value}
