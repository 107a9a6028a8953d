"""The memory plan of a graph as its nodes carry it, and as a map for people.

``meta["buffer"]`` of a node that makes one tensor, and of a ``getitem`` that takes one of several, is (offset, bytes)
in the arena; ``meta["buffers"]`` of a call with several results has one for each, None for what lies elsewhere;
``meta["scratch"]`` one for each piece of memory that a call needs while it runs. A node without any makes nothing new,
or something that lies outside.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from torch.fx import Graph, Node

from kimigraph.ir.fake import describe
from kimigraph.ir.lifetimes import Lifetimes, NewTensor
from kimigraph.ir.schedule import stream_of

ALIGNMENT = 256
"""Every tensor of the arena begins at a multiple of this many bytes, as those of torch's own allocator do at 512."""

Place = tuple[int, int]


def aligned(nbytes: int) -> int:
    """``nbytes`` rounded up to the next place where a tensor may begin."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def set_place(tensor: NewTensor, offset: int) -> None:
    """Record where a tensor lies on all nodes that stand for it."""
    place = (offset, tensor.nbytes)
    for name in tensor.names:
        name.meta["buffer"] = place
    if tensor.index is not None and tensor.index < 0:
        tensor.maker.meta["scratch"] = (*tensor.maker.meta.get("scratch", ()), place)
    elif tensor.index is not None:
        count = len(tensor.maker.meta["val"])
        known: tuple[Place | None, ...] = tensor.maker.meta.get("buffers", (None,) * count)
        tensor.maker.meta["buffers"] = (*known[: tensor.index], place, *known[tensor.index + 1 :])


def clear_plan(graph: Graph) -> None:
    """Forget an earlier plan."""
    for node in graph.nodes:
        node.meta.pop("buffer", None)
        node.meta.pop("buffers", None)
        node.meta.pop("scratch", None)


def places(node: Node) -> tuple[Place | None, ...]:
    """Where the results of a call lie, one for each; empty for a call without places in the arena."""
    if "buffers" in node.meta:
        return node.meta["buffers"]
    return (node.meta["buffer"],) if "buffer" in node.meta else ()


def scratch_places(node: Node) -> tuple[Place, ...]:
    """Where the scratch of a call lies, in the order in which it asks for it."""
    return node.meta.get("scratch", ())


def arena_bytes(graph: Graph) -> int:
    """Bytes of the arena: 0 where nothing is planned."""
    found = (place for node in graph.nodes for place in (*places(node), *scratch_places(node)) if place)
    return aligned(max((offset + nbytes for offset, nbytes in found), default=0))


@dataclass(frozen=True)
class MapEntry:
    """A tensor in the arena: its place, the nodes that touch it first and last, and the stream of its maker."""

    name: str
    form: str
    offset: int
    nbytes: int
    first: str
    last: str
    stream: int


def _entries(lifetimes: Lifetimes) -> list[MapEntry]:
    """The tensors of a planned graph by offset, then in the order in which they are made."""
    entries: list[MapEntry] = []
    for number, tensor in enumerate(lifetimes.tensors):
        place = _place_of(tensor)
        if place is not None:
            first, last = (node.name for node in lifetimes.span(number))
            entries.append(MapEntry(tensor.name, describe(tensor.value), *place, first, last, stream_of(tensor.maker)))
    return sorted(entries, key=lambda entry: entry.offset)


def print_map(graph: Graph) -> str:
    """The arena as a table: one line a tensor, in the order of offsets."""
    lifetimes = Lifetimes(graph)
    entries = _entries(lifetimes)
    bound = lifetimes.lower_bound([aligned(tensor.nbytes) for tensor in lifetimes.tensors])
    total = arena_bytes(graph)
    head = [
        f"arena: {total:,} bytes for {len(entries)} tensors of {sum(entry.nbytes for entry in entries):,} bytes",
        f"in use at once: {bound:,} bytes" + (f" ({total / bound:.3f} times as much is reserved)" if bound else ""),
        "",
    ]
    rows = [("offset", "bytes", "stream", "tensor", "form", "from", "to"), *(_row(entry) for entry in entries)]
    widths = [max(len(row[column]) for row in rows) for column in range(7)]
    return "\n".join([*head, *_lines(rows, widths)]) + "\n"


def _row(entry: MapEntry) -> tuple[str, ...]:
    numbers = (f"{entry.offset:,}", f"{entry.nbytes:,}", str(entry.stream))
    return (*numbers, entry.name, entry.form, entry.first, entry.last)


def _lines(rows: list[tuple[str, ...]], widths: list[int]) -> Iterator[str]:
    for row in rows:
        cells = [
            cell.rjust(width) if column < 3 else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()


def _place_of(tensor: NewTensor) -> Place | None:
    if tensor.index is not None and tensor.index < 0:
        return scratch_places(tensor.maker)[~tensor.index] if scratch_places(tensor.maker) else None
    found = places(tensor.maker)
    return found[tensor.index or 0] if found else None
