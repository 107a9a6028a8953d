"""What the order of a scheduled program leaves open: dependences that nothing keeps, streams that are not joined."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch.fx import Graph, Node

from kimigraph.ir.dependences import Dependence
from kimigraph.ir.schedule import HappensBefore, stream_of

_ONE_STREAM = "--disable-pass assign-streams compiles for one stream"


@dataclass(frozen=True)
class Violation:
    """A fault of a schedule: the node that shows it, the one that it should wait for if any, and what to say."""

    node: Node
    text: str
    remedy: str
    missing: Node | None = None

    def describe(self) -> str:
        """One paragraph for people."""
        return f"{self.text}; {self.remedy}"


def missing_edge(first: Node, second: Node, reason: str, remedy: str) -> Violation:
    """``second`` may begin before ``first`` is done, and must not."""
    text = (
        f"{second.name} (stream {stream_of(second)}) may begin before {first.name} (stream {stream_of(first)}) is done:"
        f" {reason}; the edge {first.name} -> {second.name} is missing"
    )
    return Violation(second, text, remedy, first)


def unkept_dependences(dependences: Mapping[Node, Sequence[Dependence]], order: HappensBefore) -> Iterator[Violation]:
    """Dependences between nodes of different streams that no wait keeps; the order of collectives is among them."""
    for node, items in dependences.items():
        for item in items:
            if not order.ordered(item.first, node):
                yield missing_edge(item.first, node, _reason(item), _ONE_STREAM)


def unjoined_streams(graph: Graph, order: HappensBefore) -> Iterator[Violation]:
    """The last node of each side stream that the caller's stream does not wait for before the program returns."""
    output = next(iter(reversed(graph.nodes)))
    last = {place.stream: node for node, place in order.places.items()}
    for stream, node in last.items():
        if stream and order.end[stream] < order.places[node].number:
            reason = (
                f"stream {stream} is not joined, so outputs and updated inputs are not ordered before what the caller"
                " queues next, and no graph can be captured"
            )
            yield missing_edge(node, output, reason, _ONE_STREAM)


def _reason(item: Dependence) -> str:
    if item.kind == "operand":
        return "it takes its result"
    if item.kind == "order of effects":
        return "collectives, random numbers and assertions keep one order, the same on every rank"
    if item.kind == "one at a time":
        return "kernels of both keep counters from launch to launch, so that they must not run at once"
    return item.kind + ("" if item.storage is None else f" in the storage of {item.storage.name}")
