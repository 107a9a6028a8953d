"""Columns of a tensor's last dim in the tensors below it: through slices, splits, casts, views that keep the rows."""

from dataclasses import dataclass, replace

import torch
from torch.fx import Node

from kimigraph.passes.algebra.layout import replay
from kimigraph.passes.algebra.nodes import COPIES, is_cast, is_split_item, is_view, packet, shape


@dataclass(frozen=True)
class Strip:
    """``width`` columns of ``node``'s last dim, ``step`` apart from ``start`` on; ``path`` are the nodes walked."""

    node: Node
    start: int
    step: int
    width: int
    path: tuple[Node, ...] = ()


def strips(node: Node) -> list[Strip]:
    """The columns of ``node`` in itself and in each tensor below it, outermost first."""
    found = [Strip(node, 0, 1, shape(node)[-1])]
    while (below := _below(found[-1])) is not None:
        found.append(below)
    return found


def same_rows(one: Node, other: Node) -> bool:
    """Whether two tensors have the same rows in the same order: dims of size 1 and the last dim do not matter."""
    return [size for size in shape(one)[:-1] if size != 1] == [size for size in shape(other)[:-1] if size != 1]


def through(node: Node) -> Strip:
    """The lowest tensor that holds just what ``node`` holds, row by row."""
    return [one for one in strips(node) if _whole(one)][-1]


def _whole(strip: Strip) -> bool:
    return (strip.start, strip.step, strip.width) == (0, 1, shape(strip.node)[-1])


def _below(strip: Strip) -> Strip | None:
    node = strip.node
    if node.op != "call_function":
        return None
    item = is_split_item(node)
    source = node.args[0]
    inner = source.args[0] if item and isinstance(source, Node) else source
    if not isinstance(inner, Node) or not shape(inner) or not shape(node):
        return None
    path = (*strip.path, node, *([source] if item and isinstance(source, Node) else []))
    if item or packet(node) in ("slice", "narrow"):
        columns = _columns(node, inner)
        if columns is None or not same_rows(node, inner):
            return None
        start, step = columns
        return Strip(inner, start + step * strip.start, step * strip.step, strip.width, path)
    keeps = node.target in COPIES or is_cast(node) or (is_view(node) and _keeps_columns(node, inner))
    return replace(strip, node=inner, path=path) if keeps and same_rows(node, inner) else None


def _keeps_columns(node: Node, inner: Node) -> bool:
    """Whether a view only inserts, drops or moves dims of size 1 before the last one."""
    return packet(node) not in ("expand", "select") and shape(node)[-1] == shape(inner)[-1] and shape(node)[-1] != 1


def _columns(node: Node, inner: Node) -> tuple[int, int] | None:
    """First column and step of a slice of the last dim; None for another dim."""
    sizes = shape(inner)
    try:
        picked = replay([node], torch.arange(sizes[-1]).view([1] * (len(sizes) - 1) + [-1])).flatten()
    except (RuntimeError, IndexError, TypeError):
        return None
    if not len(picked) or shape(node)[:-1] != sizes[:-1] or len(picked) != shape(node)[-1]:
        return None
    step = int(picked[1] - picked[0]) if len(picked) > 1 else 1
    return int(picked[0]), step
