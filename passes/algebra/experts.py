"""The products of routed experts read from a graph, in the three ways in which models with static shapes write them.

``gathered``: the weights of each pick are copied out and multiplied by ``bmm``. ``grouped``: picks sorted by expert,
one grouped product. ``exhaustive``: every expert on every token, of which the picks are kept.
"""

from dataclasses import dataclass

import torch
from torch.fx import Node

from kimigraph.passes.algebra.frames import Frame
from kimigraph.passes.algebra.gating import Gating, gating_of
from kimigraph.passes.algebra.layout import Layout, contiguous, layout, peel
from kimigraph.passes.algebra.nodes import argument, constant, described, dtype, is_cast, is_view, packet, shape
from kimigraph.passes.algebra.refusal import Refused
from kimigraph.passes.algebra.routing import Routing

GROUPED = frozenset(("_grouped_mm", "grouped_mm"))


@dataclass(frozen=True)
class RoutedExperts:
    """``out`` [N, D] = the weighted sum over each token's picks of down(act(gate, up)) of rows of ``x`` [N, D]."""

    x: Node
    gate_up: Node
    down: Node
    gating: Gating
    products: tuple[Node, Node]
    out: Node


def experts_at(routing: Routing) -> RoutedExperts:
    """The experts that a routing feeds. Refused where they compute, or are combined, in another way."""
    outputs, out = _combined(routing)
    base, chain = peel(outputs, "float")
    if layout(base, chain) != contiguous(shape(outputs)):
        raise Refused("the experts: their outputs are not in the order of the picks", outputs)
    form, last = _form_of(base, routing)
    down, hidden = _product(last, form, routing)
    inner, chain = peel(hidden, "float")
    if layout(inner, chain) != contiguous(shape(hidden)):
        raise Refused("the experts: the activation's result changes its order", hidden)
    gating = gating_of(inner, Frame.of("pqrs"[: len(shape(inner))]))
    first = _halves(gating, shape(inner))
    gate_up, rows = _product(first, form, routing)
    x = _rows(rows, form, routing)
    width = shape(x)[-1]
    sizes = (routing.count, 2 * shape(inner)[-1], width), (routing.count, width, shape(inner)[-1])
    if (shape(gate_up), shape(down)) != sizes or shape(x) != (routing.tokens, width):
        raise Refused(f"the experts: weights {list(shape(gate_up))} and {list(shape(down))} do not fit x", first)
    if {dtype(gate_up), dtype(down)} != {dtype(x)} or dtype(out) != dtype(x):
        raise Refused("the experts: rows, weights and result differ in type", out)
    return RoutedExperts(x, gate_up, down, gating, (first, last), out)


def _combined(routing: Routing) -> tuple[Node, Node]:
    """(what the weights multiply, the sum over the picks of it), the sum cast back to the type of the rows."""
    chain: list[Node] = []
    node = routing.weights
    user = _only_user(node)
    while is_view(user):
        chain.append(user)
        node, user = user, _only_user(user)
    tokens, each = routing.tokens, routing.each
    if packet(user) != "mul" or shape(node) not in ((tokens, each, 1), (tokens * each, 1)):
        raise Refused(f"the experts: their weights go into {described(user)}, not into a product with outputs", user)
    if layout(routing.weights, chain) != contiguous(shape(node)):
        raise Refused("the experts: their weights are not in the order of the picks", node)
    outputs = next((operand for operand in user.args[:2] if operand is not node), None)
    if not isinstance(outputs, Node) or shape(outputs) != shape(user):
        raise Refused("the experts: their weights go into a product of another shape", user)
    product = user
    chain = []
    total = _only_user(product)
    while is_view(total):
        chain.append(total)
        total = _only_user(total)
    last = chain[-1] if chain else product
    ordered = layout(product, chain) == contiguous((tokens, each, shape(product)[-1]))
    if packet(total) != "sum" or not ordered or list(argument(total, "dim") or ()) != [1] or argument(total, "keepdim"):
        raise Refused("the experts: no sum over the picks of a token", last)
    cast = next(iter(total.users)) if len(total.users) == 1 else total
    return outputs, cast if is_cast(cast) else total


def _only_user(node: Node) -> Node:
    users = [user for user in node.users if packet(user) != "_assert_tensor_metadata"]
    if len(users) != 1:
        raise Refused(f"the experts: {node.name} has {len(users)} uses, wanted one", node)
    return users[0]


def _form_of(base: Node, routing: Routing) -> tuple[str, Node]:
    """How the experts are written, and the node of their last product."""
    name = packet(base)
    if name == "bmm":
        return "gathered", base
    if name == "index":
        source, places = base.args[0], base.args[1]
        order = places[0] if isinstance(places, list | tuple) and len(places) == 1 else None
        if isinstance(source, Node) and packet(source) in GROUPED and isinstance(order, Node):
            if packet(order) == "argsort" and isinstance(order.args[0], Node) and _sorts(order.args[0], routing):
                return "grouped", source
    if name == "gather" and base.args[1] == 1 and isinstance(base.args[0], Node) and isinstance(base.args[2], Node):
        product, chain = peel(base.args[0], "none")
        picks, repeated = peel(base.args[2], "none")
        tokens, count = routing.tokens, routing.count
        width = shape(base)[-1]
        wanted = torch.empty(count, tokens, width, device="meta").transpose(0, 1)
        spread = torch.empty(tokens, routing.each, 1, device="meta").expand(-1, -1, width)
        if picks is routing.picks and layout(product, chain) == Layout.of(wanted):
            if layout(picks, repeated) == Layout.of(spread):
                return "exhaustive", product
    raise Refused(f"the experts: their outputs come from {described(base)}, in a form that is not known", base)


def _product(node: Node, form: str, routing: Routing) -> tuple[Node, Node]:
    """(weight [E, out, in], the rows that it multiplies) of a product of all picks."""
    if form == "gathered":
        weight, rows = node.args[:2] if packet(node) == "bmm" else (None, None)
        if isinstance(weight, Node) and isinstance(rows, Node) and packet(weight) == "index":
            places = weight.args[1]
            place = places[0] if isinstance(places, list | tuple) and len(places) == 1 else None
            if isinstance(place, Node) and isinstance(weight.args[0], Node) and _lists(place, routing):
                below, chain = _below(rows)
                if layout(below, chain) == contiguous(shape(rows)):
                    return weight.args[0], below
    names = GROUPED if form == "grouped" else ("bmm", "matmul")
    left, right = node.args[:2] if packet(node) in names and form != "gathered" else (None, None)
    if isinstance(left, Node) and isinstance(right, Node):
        weight, chain = peel(right, "none")
        sizes = shape(weight)
        turned = Layout.of(torch.empty(sizes, device="meta").transpose(-2, -1)) if len(sizes) == 3 else None
        if turned is not None and layout(weight, chain) == turned:
            if form == "exhaustive" or _ends(argument(node, "offs"), routing):
                return weight, left
    raise Refused(f"the experts: {described(node)} is no product of picks and their weights", node)


def _below(node: Node) -> tuple[Node, list[Node]]:
    """The node under a column's ``unsqueeze``."""
    inner = node.args[0] if packet(node) == "unsqueeze" else None
    return (inner, [node]) if isinstance(inner, Node) else (node, [])


def _halves(gating: Gating, sizes: tuple[int, ...]) -> Node:
    """The product whose first half is the gate and whose second half is up."""
    base = gating.gate[0].base
    whole = torch.empty((*sizes[:-1], 2 * sizes[-1]), device="meta")
    for leaves, start in ((gating.gate, 0), (gating.up, sizes[-1])):
        wanted = Layout.of(whole.narrow(-1, start, sizes[-1]))
        for leaf in leaves:
            if leaf.base is not base or layout(leaf.base, leaf.chain) != wanted:
                raise Refused("the experts: gate and up are not the halves of one product", leaf.node)
    return base


def _rows(rows: Node, form: str, routing: Routing) -> Node:
    """The tokens [N, D] whose rows meet the picks."""
    source: object = rows
    if form == "gathered" and routing.each > 1:
        repeats = rows.args[1:3] if packet(rows) == "repeat_interleave" else ()
        source = rows.args[0] if repeats == (routing.each, 0) else None
    elif form == "grouped":
        places = rows.args[1] if packet(rows) == "index" else ()
        place = places[0] if isinstance(places, list | tuple) and len(places) == 1 else None
        source = rows.args[0] if isinstance(place, Node) and _token_of_sorted(place, routing) else None
    if not isinstance(source, Node):
        raise Refused("the experts: their rows are not those of the tokens that picked them", rows)
    return source


def _lists(node: Node, routing: Routing) -> bool:
    """Whether it is the picks one after the other."""
    base, chain = peel(node)
    return base is routing.picks and layout(base, chain) == contiguous((routing.pairs,))


def _sorts(node: Node, routing: Routing) -> bool:
    """Whether it is an order in which the picks are sorted by expert."""
    listed = node.args[0] if packet(node) == "argsort" else None
    dims, descending = argument(node, "dim", -1), argument(node, "descending", False)
    return isinstance(listed, Node) and _lists(listed, routing) and dims in (-1, 0) and not descending


def _token_of_sorted(node: Node, routing: Routing) -> bool:
    if packet(node) not in ("floor_divide", "div") or node.args[1] != routing.each:
        return False
    rounded = packet(node) == "floor_divide" or node.kwargs.get("rounding_mode") in ("floor", "trunc")
    return rounded and isinstance(node.args[0], Node) and _sorts(node.args[0], routing)


def _ends(node: object, routing: Routing) -> bool:
    """Whether it is where each expert's picks end: the running sum of how often each was picked."""
    if not isinstance(node, Node) or packet(node) != "cumsum" or argument(node, "dim") not in (0, -1):
        return False
    total = node.args[0]
    if not isinstance(total, Node) or packet(total) != "sum" or list(argument(total, "dim") or ()) != [0]:
        return False
    counted = total.args[0]
    if not isinstance(counted, Node) or packet(counted) != "one_hot" or constant(counted.args[1]) != routing.count:
        return False
    return isinstance(counted.args[0], Node) and _lists(counted.args[0], routing)
