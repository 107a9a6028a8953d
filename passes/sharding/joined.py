"""Sums over ranks that do not wait for one another become one: their addends go side by side."""

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

import torch
from torch.fx import Graph, Node

from kimigraph.ir.dependences import starts_work
from kimigraph.ir.mesh import COLLECTIVES, TP_GROUP
from kimigraph.ir.purity import is_pure
from kimigraph.passes.algebra.nodes import shape
from kimigraph.passes.algebra.rewrite import call

ATEN = torch.ops.aten
C10D: Any = getattr(torch.ops, COLLECTIVES)


LONGEST = 4 << 20
"""Bytes of an addend above which sums stay apart: what they take beyond the fixed part can be hidden, one behind the
work for the other (``overlap-communication``), and joined there is nothing left to hide behind."""


def join_sums(graph: Graph) -> int:
    """Make one all-reduce of each two of which the second's addends can be had before anybody needs the first's sum.

    Routed and shared experts are the case: the norm behind the routed ones waits for their sum, the shared ones do not
    wait for it. What the second's addends are computed by moves in front of the first. Returns how many went. Long
    ones stay apart: of them the second begins in front of the work for the first.
    """
    count = 0
    places = {node: place for place, node in enumerate(graph.nodes)}
    sums = [node for node in graph.nodes if node.target is C10D.all_reduce.default]
    while len(sums) > 1:
        first, second, *rest = sums
        moving = _moving(first, second, places)
        if moving is None:
            sums = [second, *rest]
            continue
        if any(node.meta["val"].nbytes > LONGEST for node in (first, second)):
            sums = [second, *rest] if not _advance(first, second, moving, places) else [first, *rest]
            continue
        for node in moving:
            first.prepend(node)
        _join(graph, first, second)
        count, sums = count + 1, rest
    return count


def _moving(first: Node, second: Node, places: dict[Node, int]) -> list[Node] | None:
    """What stands behind ``first`` and makes the addends of ``second``; None where that waits for the sum or writes."""
    if first.meta["val"].dtype != second.meta["val"].dtype:
        return None
    found, waiting = set[Node](), list(second.all_input_nodes)
    while waiting:
        node = waiting.pop()
        if node in found or places[node] < places[first]:
            continue
        if node is first or not is_pure(node):
            return None
        found.add(node)
        waiting += node.all_input_nodes
    return sorted(found, key=lambda node: places[node])


def _advance(first: Node, second: Node, moving: list[Node], places: dict[Node, int]) -> bool:
    """Let ``second`` begin in front of the work that makes the addends of ``first``, if it waits for none of that.

    ``moving`` makes its own addends.
    """
    [work] = first.all_input_nodes
    while not starts_work(work) and work.all_input_nodes:
        work = work.all_input_nodes[0]
    own = {*moving}
    needed = [item for node in (*moving, second) for item in node.all_input_nodes if item not in own]
    if not is_pure(work) or any(places[item] >= places[work] for item in needed):
        return False
    for node in (*moving, second):
        work.prepend(node)
    return True


def _join(graph: Graph, first: Node, second: Node) -> None:
    """One sum over both addends, flat and one behind the other, in front of ``first``'s place."""
    pair = (first, second)
    addends = [node.all_input_nodes[0] for node in pair]
    flat = [
        call(graph, ATEN.reshape.default, (addend, [-1]), like=node, before=first)
        for node, addend in zip(pair, addends, strict=True)
    ]
    both = call(graph, ATEN.cat.default, (flat,), like=first, before=first)
    pending = call(graph, C10D.all_reduce.default, (both, "sum", TP_GROUP), like=first, before=first)
    whole = call(graph, C10D.wait_tensor.default, (pending,), like=first, before=first)
    for node, (begin, end) in zip(pair, _spans(pair), strict=True):
        [waited] = node.users
        part = call(graph, ATEN.slice.Tensor, (whole, 0, begin, end), like=node, before=first)
        waited.replace_all_uses_with(
            call(graph, ATEN.view.default, (part, list(shape(node))), like=node, before=first), propagate_meta=False
        )
        graph.erase_node(waited)
    graph.erase_node(second)
    graph.erase_node(first)


def _spans(nodes: Sequence[Node]) -> Iterator[tuple[int, int]]:
    begin = 0
    for node in nodes:
        end = begin + prod(shape(node))
        yield begin, end
        begin = end
