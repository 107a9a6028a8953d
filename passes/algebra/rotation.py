"""Rotary positions as models spell them: which columns turn, in what pairs, by which cosines and sines."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import permutations
from typing import Any

import torch
from torch.fx import Node

from kimigraph.passes.algebra.layout import peel
from kimigraph.passes.algebra.nodes import argument, is_view, packet, rank, shape
from kimigraph.passes.algebra.strips import Strip, strips, through
from kimigraph.passes.algebra.unify import scaling


@dataclass(frozen=True)
class Angles:
    """Cosines or sines, one a pair: ``node`` itself, or the first half of its columns."""

    node: Node
    halved: bool = False


@dataclass(frozen=True)
class Rotation:
    """``x`` with its first columns turned in the pairs of ``style``; ``path`` are the nodes that do it."""

    x: Node
    cos: Angles
    sin: Angles
    style: str
    path: tuple[Node, ...]


def rotation_of(value: Node) -> Rotation | None:
    """The rotation whose result ``value`` is; None where it is none that a cache writer knows."""
    outer = through(value)
    parts = _side_by_side(outer.node)
    candidates: list[tuple[Node, Node | None]] = [(outer.node, None)]
    if len(parts) == 2:
        candidates.append((parts[0], parts[1]))
    if len(parts) == 3:
        found = _of_pairs(parts[:2], parts[2], "apart", (outer.node,))
        return None if found is None else replace(found, path=(*outer.path, *found.path))
    for turned, rest in candidates:
        found = _turned(turned, rest)
        if found is not None:
            own = (outer.node,) if rest is not None else ()
            return replace(found, path=(*outer.path, *own, *found.path))
    return None


def _side_by_side(node: Node) -> list[Node]:
    """The operands of a concatenation along the last dim."""
    if packet(node) != "cat" or argument(node, "dim", 0) not in (-1, rank(node) - 1):
        return []
    tensors = argument(node, "tensors")
    return [part for part in tensors if isinstance(part, Node) and shape(part)[-1]] if tensors else []


def _turned(node: Node, rest: Node | None) -> Rotation | None:
    """A rotation of whole pairs, with ``rest`` the columns behind that do not turn."""
    inner = through(node)
    parts = _side_by_side(inner.node)
    if len(parts) == 2:
        return _of_pairs(parts, rest, "apart", (*inner.path, inner.node))
    stacked = inner.node.args[0] if is_view(inner.node) else None
    if isinstance(stacked, Node) and packet(stacked) == "stack" and _flattens_pairs(inner.node, stacked):
        tensors = [part for part in argument(stacked, "tensors") if isinstance(part, Node)]
        return _of_pairs(tensors, rest, "together", (*inner.path, inner.node, stacked)) if len(tensors) == 2 else None
    if packet(inner.node) == "add":
        return _of_halves(inner.node, rest, (*inner.path, inner.node))
    return None


def _flattens_pairs(view: Node, stacked: Node) -> bool:
    dims = rank(stacked)
    return argument(stacked, "dim", 0) in (-1, dims - 1) and shape(view) == (
        *shape(stacked)[:-2],
        2 * shape(stacked)[-2],
    )


def _of_pairs(halves: list[Node], rest: Node | None, stored: str, path: tuple[Node, ...]) -> Rotation | None:
    """first * cos - second * sin, and second * cos + first * sin."""
    one, two = (through(half) for half in halves)
    if packet(one.node) != "sub" or packet(two.node) != "add":
        return None
    products = [_product(value) for value in (*one.node.args[:2], *two.node.args[:2])]
    path = (*path, *one.path, one.node, *two.path, two.node)
    for first, cos, second, sin in _assignments(products):
        found = _common(first, second, rest)
        if found is None:
            continue
        x, starts, step, further = found
        half = shape(first)[-1]
        style = {
            ("apart", (0, half), 1): "half_split",
            ("apart", (0, 1), 2): "deinterleaved",
            ("together", (0, 1), 2): "interleaved",
        }.get((stored, starts, step))
        if style is not None and _reaches(cos, x, half) and _reaches(sin, x, half):
            multiplied = [value for value in (*one.node.args[:2], *two.node.args[:2]) if isinstance(value, Node)]
            return Rotation(x, Angles(cos), Angles(sin), style, (*path, *multiplied, *further))
    return None


def _product(value: Any) -> tuple[Node, Node] | None:
    if not isinstance(value, Node) or packet(value) != "mul":
        return None
    left, right = value.args[0], value.args[1]
    return (left, right) if isinstance(left, Node) and isinstance(right, Node) else None


def _assignments(products: list[tuple[Node, Node] | None]) -> Iterator[tuple[Node, Node, Node, Node]]:
    """(first, cos, second, sin) that make the four products: first cos, second sin, second cos, first sin."""
    if any(product is None for product in products):
        return
    minuend, subtrahend, *added = (product for product in products if product is not None)
    wanted = {frozenset(map(id, product)) for product in added}
    for (first, cos), (second, sin) in ((a, b) for a in permutations(minuend) for b in permutations(subtrahend)):
        if {frozenset((id(second), id(cos))), frozenset((id(first), id(sin)))} == wanted:
            yield first, cos, second, sin


def _common(first: Node, second: Node, rest: Node | None) -> tuple[Node, tuple[int, int], int, tuple[Node, ...]] | None:
    """The tensor whose columns ``first``, ``second`` and ``rest`` are, all of them: with starts, step, nodes walked."""
    if shape(first)[-1] != shape(second)[-1]:
        return None
    turning = 2 * shape(first)[-1]
    total = turning + (0 if rest is None else shape(rest)[-1])
    others = {one.node: one for one in strips(second)}
    behind = None if rest is None else {one.node: one for one in strips(rest)}
    for one in strips(first):
        two = others.get(one.node)
        tail: Strip | None = one if behind is None else behind.get(one.node)
        if two is None or tail is None or shape(one.node)[-1] != total or one.step != two.step or one.start != 0:
            continue
        if behind is not None and (tail.start, tail.step) != (turning, 1):
            continue
        walked = (*one.path, *two.path, *(tail.path if behind is not None else ()))
        return one.node, (one.start, two.start), one.step, walked
    return None


def _of_halves(total: Node, rest: Node | None, path: tuple[Node, ...]) -> Rotation | None:
    """x * cos + concatenation(-second half, first half) * sin, cosines and sines repeat after half of them."""
    products = [_product(value) for value in total.args[:2]]
    if products[0] is None or products[1] is None:
        return None
    for straight, crossed in permutations((products[0], products[1])):
        for (x, cos), (swapped, sin) in ((a, b) for a in permutations(straight) for b in permutations(crossed)):
            halves = _swapped_halves(swapped)
            if halves is None or not (_repeats(cos) and _repeats(sin)):
                continue
            first, second, walked = halves
            found = _common(first, second, rest)
            half = shape(first)[-1]
            if found is None or found[1:3] != ((0, half), 1) or not _is_window(x, found[0], 2 * half):
                continue
            if not (_reaches(cos, found[0], 2 * half) and _reaches(sin, found[0], 2 * half)):
                continue
            windows = next(one.path for one in strips(x) if one.node is found[0])
            multiplied = [value for value in total.args[:2] if isinstance(value, Node)]
            nodes = (*path, *multiplied, *walked, *found[3], *windows)
            return Rotation(found[0], Angles(cos, True), Angles(sin, True), "half_split", nodes)
    return None


def _swapped_halves(node: Node) -> tuple[Node, Node, tuple[Node, ...]] | None:
    """(first, second) of a concatenation of -second and first."""
    inner = through(node)
    parts = _side_by_side(inner.node)
    if len(parts) != 2 or packet(parts[0]) != "neg" or not isinstance(parts[0].args[0], Node):
        return None
    return parts[1], parts[0].args[0], (*inner.path, inner.node, parts[0])


def _is_window(x: Node, base: Node, width: int) -> bool:
    """Whether ``x`` is the first ``width`` columns of ``base``."""
    return any(one.node is base and (one.start, one.step, one.width) == (0, 1, width) for one in strips(x))


def _reaches(angles: Node, x: Node, columns: int) -> bool:
    """Whether angles have one of so many columns each, and broadcast to the rows of ``x`` as they are."""
    if shape(angles)[-1:] != (columns,):
        return False
    try:
        rows = torch.broadcast_shapes(shape(angles)[:-1], shape(x)[:-1])
    except RuntimeError:
        return False
    return rows == shape(x)[:-1]


def _repeats(node: Node) -> bool:
    """Whether the second half of the columns equals the first: cosine or sine of a tensor laid beside itself."""
    while True:
        width = shape(node)[-1:]
        node = peel(node, casts="float")[0]
        if shape(node)[-1:] != width:
            return False
        step = scaling(node)
        if step is not None:
            node = step[0]
        elif packet(node) in ("cos", "sin") and isinstance(node.args[0], Node):
            node = node.args[0]
        else:
            break
    parts = _side_by_side(node)
    return len(parts) == 2 and parts[0] is parts[1]
