"""Positions and counters: each region computes its own, so that none waits for the one that did so first.

A few integers that come from inputs which the step does not write cost nothing. A region that waits for another only
for them could not become one kernel with it.
"""

from collections.abc import Collection

import torch
from torch.fx import Graph, Node

from kimigraph.ir.launches import launches_of
from kimigraph.ir.pointwise.loops import is_known
from kimigraph.ir.pointwise.views import is_index_map
from kimigraph.ir.purity import mutated_arguments, storage_root

MOST = 1024
"""Elements of what is computed more than once."""


def spread(graph: Graph) -> dict[Node, Node]:
    """Give each operation that can be part of a region its own copy of positions that others use too.

    Returns the copies with what they are copies of. What nothing uses any more is gone.
    """
    cheap = _positions(graph)
    copies: dict[Node, Node] = {}
    for user in list(graph.nodes):
        if user not in cheap and launches_of(user) and is_known(user):
            copies |= _own(graph, user, cheap)
    for node in reversed(list(cheap) if copies else ()):
        if not node.users:
            graph.erase_node(node)
    return {copy: source for copy, source in copies.items() if launches_of(copy)}


def sink(graph: Graph) -> bool:
    """Put positions right before the first of what uses them, where regions stand that they can join."""
    moved = False
    for node in reversed(list(_positions(graph))):
        first = min(node.users, default=None)
        if first is not None and first.op != "output" and first.prev is not node:
            first.prepend(node)
            moved = True
    return moved


def settle(copies: dict[Node, Node], fused: Collection[Node]) -> None:
    """Let copies that became part of no region be one again."""
    first: dict[Node, Node] = {}
    for copy in sorted(copy for copy in copies if copy not in fused and copy.users):
        known = first.setdefault(copies[copy], copy)
        if known is not copy:
            copy.replace_all_uses_with(known, propagate_meta=False)
            copy.graph.erase_node(copy)


def _positions(graph: Graph) -> dict[Node, None]:
    """All of them, with views of them, in order."""
    changing = {storage_root(target) for node in graph.nodes for target in mutated_arguments(node)}
    cheap: dict[Node, None] = {}
    for node in graph.nodes:
        if _is_cheap(node, cheap, changing):
            cheap[node] = None
    return cheap


def _is_cheap(node: Node, cheap: Collection[Node], changing: Collection[Node]) -> bool:
    """Whether it is a view of such positions, or computes them from a few others or from inputs that nobody writes."""
    value = node.meta.get("val")
    if node.op != "call_function" or not isinstance(value, torch.Tensor) or not (is_known(node) or is_index_map(node)):
        return False
    if value.dtype.is_floating_point or value.dtype is torch.bool or value.numel() > MOST or mutated_arguments(node):
        return False
    given = node.all_input_nodes
    return all(item in cheap or (item.op == "placeholder" and item not in changing) for item in given)


def _own(graph: Graph, user: Node, cheap: Collection[Node]) -> dict[Node, Node]:
    """Copies of the positions that ``user`` reads, where they are used elsewhere too."""
    cone: set[Node] = set()
    waiting = [item for item in user.all_input_nodes if item in cheap]
    while waiting:
        node = waiting.pop()
        if node not in cone:
            cone.add(node)
            waiting += [item for item in node.all_input_nodes if item in cheap]
    inside = cone | {user}
    if not any(launches_of(node) and any(other not in inside for other in node.users) for node in cone):
        return {}
    copies: dict[Node, Node] = {}
    for node in sorted(cone):
        with graph.inserting_before(user):
            copies[node] = graph.node_copy(node, lambda item: copies.get(item, item))
        copies[node].meta = dict(node.meta) | {"replaces": node.meta.get("replaces", (node.name,))}
        user.replace_input_with(node, copies[node])
    return {copy: source for source, copy in copies.items()}
