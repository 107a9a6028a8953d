"""Views at the border of a region: those that lead into it become its own, those that lead out are made outside."""

from collections.abc import Sequence

from torch.fx import Graph, Node

from kimigraph.ir.launches import launches_of
from kimigraph.ir.pointwise import Unfusable, lower
from kimigraph.ir.pointwise.views import is_index_map, view_source
from kimigraph.ir.purity import mutated_arguments, storage_root
from kimigraph.passes.pointwise.grow import results_of


def with_views_outside(graph: Graph, nodes: list[Node]) -> list[Node]:
    """The members of a region: views that are used outside are made again there, from what the region returns."""
    inside = set(nodes)
    outside: dict[Node, Node] = {}
    for node in nodes:
        if not launches_of(node) and any(user not in inside for user in node.users):
            copy = _copied(graph, node, inside, outside, nodes[-1])
            node.replace_all_uses_with(copy, delete_user_cb=lambda user: user not in inside, propagate_meta=False)
    for node in reversed(nodes):
        if not launches_of(node) and not node.users:
            inside.remove(node)
            graph.erase_node(node)
    return [node for node in nodes if node in inside]


def _copied(graph: Graph, node: Node, inside: set[Node], outside: dict[Node, Node], last: Node) -> Node:
    """A view behind the region that gives what ``node`` gives, with the views that it is a view of."""
    if node not in outside:
        for argument in node.all_input_nodes:
            if argument in inside and not launches_of(argument):
                _copied(graph, argument, inside, outside, last)
        place = list(outside.values())[-1] if outside else last
        with graph.inserting_after(place):
            copy = graph.node_copy(node, lambda argument: outside.get(argument, argument))
        copy.meta = dict(node.meta)
        outside[node] = copy
    return outside[node]


def with_views_inside(graph: Graph, members: list[Node]) -> list[Node]:
    """The members with copies of the views through which they read, so that addresses take their place.

    A tensor that the region writes keeps its view outside: what is written must be an input as it is. So do all views
    where the region is no kernel with them.
    """
    inside = set(members)
    written = {storage_root(target) for node in members for target in mutated_arguments(node)}
    leading: dict[Node, None] = {}
    for node in members:
        for argument in node.all_input_nodes:
            if argument not in inside and storage_root(argument) not in written:
                leading |= dict.fromkeys(_views_below(argument))
    if not leading:
        return members
    views = sorted(leading)
    try:
        lower([*views, *members], results_of(members))
    except Unfusable:
        return members
    copies: dict[Node, Node] = {}
    for view in views:
        with graph.inserting_before(members[0]):
            copies[view] = graph.node_copy(view, lambda argument: copies.get(argument, argument))
        copies[view].meta = dict(view.meta) | {"replaces": (view.name,)}
    for node in members:
        for view, copy in copies.items():
            node.replace_input_with(view, copy)
    used = [copy for copy in copies.values() if copy.users]
    for copy in reversed(list(copies.values())):
        if not copy.users:
            graph.erase_node(copy)
    return [*used, *members]


def _views_below(node: Node) -> Sequence[Node]:
    """The views from an operand down to what has memory of its own, splits included."""
    found: list[Node] = []
    while not launches_of(node) and is_index_map(node):
        found.append(node)
        source = node.args[0]
        if source is not view_source(node) and isinstance(source, Node):
            found.append(source)
        node = view_source(node)
    return found
