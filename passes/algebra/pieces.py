"""The last-dim concatenation that a tensor is: by cat, or by copies into slices of an empty tensor."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch.fx import Node

from kimigraph.passes.algebra.nodes import COPIES, argument, dtype, packet, rank, shape
from kimigraph.passes.algebra.refusal import Refused

PLAIN_VIEWS = frozenset(("alias", "detach", "clone", "contiguous"))
EMPTY = frozenset(("new_empty", "empty", "empty_like", "empty_strided", "new_empty_strided"))


@dataclass(frozen=True)
class Piece:
    """Columns ``start`` to ``stop`` of the last dim, held by ``node``.

    ``reader`` is the node that copies them into the concatenation, None where nothing does.
    """

    start: int
    stop: int
    node: Node
    reader: Node | None = None

    @property
    def width(self) -> int:
        """Number of columns."""
        return self.stop - self.start


def pieces(node: Node) -> list[Piece]:
    """The parts of ``node`` along its last dim, in order; parts of no width are left out.

    A tensor that is no concatenation is one piece, an empty tensor none. Refused when a part is partly overwritten.
    """
    base = node
    while packet(base) in PLAIN_VIEWS or base.target in COPIES:
        inner = base.args[0]
        assert isinstance(inner, Node)
        base = inner
    name = packet(base)
    if name == "cat" and argument(base, "dim") in (-1, rank(base) - 1):
        parts = argument(base, "tensors")
        return (
            _side_by_side([part for part in parts if isinstance(part, Node)], base)
            if isinstance(parts, list | tuple)
            else []
        )
    if name == "slice_scatter":
        return _overwritten(base)
    if name == "copy":
        return pieces(_copied(base))
    if name in EMPTY:
        return []
    return [Piece(0, shape(node)[-1], node)]


def _side_by_side(parts: Sequence[Node], cat: Node) -> list[Piece]:
    found: list[Piece] = []
    start = 0
    for part in parts:
        width = shape(part)[-1]
        if width:
            found.append(Piece(start, start + width, part, cat))
        start += width
    return found


def _overwritten(node: Node) -> list[Piece]:
    below, source = node.args[0], node.args[1]
    total = shape(node)[-1]
    if argument(node, "dim") not in (-1, rank(node) - 1) or argument(node, "step") != 1:
        raise Refused("a slice is written that is no range of the last dim", node)
    start, stop = argument(node, "start") or 0, argument(node, "end")
    if not isinstance(below, Node) or not isinstance(source, Node) or not isinstance(start, int):
        raise Refused("a slice is written at a computed place", node)
    stop = total if not isinstance(stop, int) else min(stop, total)
    kept: list[Piece] = []
    for piece in pieces(below):
        if piece.stop <= start or piece.start >= stop:
            kept.append(piece)
        elif not (start <= piece.start and piece.stop <= stop):
            raise Refused("a part of the concatenation is partly overwritten", node)
    reader = source if packet(source) == "copy" else node
    written = [Piece(start, stop, _copied(source), reader)] if stop > start else []
    return sorted(kept + written, key=lambda piece: piece.start)


def _copied(node: Node) -> Node:
    """What a functional ``copy`` holds afterwards: its source, if it neither broadcasts nor converts."""
    while packet(node) == "copy":
        source = node.args[1]
        if not isinstance(source, Node) or shape(source) != shape(node) or dtype(source) != dtype(node):
            raise Refused("a copy broadcasts or converts", node)
        node = source
    return node


def require_cover(found: Sequence[Piece], width: int, node: Node) -> None:
    """Refuse unless the pieces lie side by side from 0 to ``width``."""
    edges = [0, *(piece.stop for piece in found)]
    if edges[-1] != width or any(piece.start != edge for piece, edge in zip(found, edges, strict=False)):
        raise Refused(f"the parts {[(p.start, p.stop) for p in found]} do not make up {width} columns", node)
