"""What follows routed experts in a graph: the norm of their sum, the product out of the latent space, shared experts.

Each part is optional, and taken along only where nothing else reads what lies between.
"""

from dataclasses import dataclass

from torch.fx import Node

from kimigraph.ir.operators import OPERATORS
from kimigraph.passes.algebra.experts import RoutedExperts
from kimigraph.passes.algebra.frames import Frame
from kimigraph.passes.algebra.gating import gating_of
from kimigraph.passes.algebra.layout import contiguous, layout, peel
from kimigraph.passes.algebra.nodes import argument, dtype, is_view, packet, shape
from kimigraph.passes.algebra.refusal import Refused


@dataclass(frozen=True)
class Shared:
    """Shared experts: their gate and up [.., J] as products give them, and the weight [d, J] that closes them."""

    gate: Node
    up: Node
    down: Node


@dataclass(frozen=True)
class Tail:
    """What is taken along up to ``out``, which has as many rows as there are tokens; ``apart`` says what is not."""

    out: Node
    norm_weight: Node | None = None
    eps: float = 1e-5
    up: Node | None = None
    shared: Shared | None = None
    apart: str = ""


def tail_of(experts: RoutedExperts) -> Tail:
    """All of the tail that the operator can take."""
    tail = _latent(experts)
    try:
        shared, out = _shared(tail.out, experts)
    except Refused as refusal:
        return Tail(tail.out, tail.norm_weight, tail.eps, tail.up, apart=refusal.reason)
    return Tail(out, tail.norm_weight, tail.eps, tail.up, shared)


def _latent(experts: RoutedExperts) -> Tail:
    """Norm and product out of the latent space, or nothing."""
    node, weight, eps = experts.out, None, 1e-5
    user = _only(node)
    if user is not None and user.target is OPERATORS["rms_norm"].overload:
        x, weight, residual = user.args[:3]
        if x is not node or residual is not None or not isinstance(weight, Node) or user.kwargs["rounds_first"]:
            return Tail(experts.out)
        if dtype(weight) != dtype(node):
            return Tail(experts.out)
        given = user.kwargs["eps"]
        assert isinstance(given, float)
        eps = given
        node, user = user, _only(user)
    closes = user is not None and packet(user) == "linear" and argument(user, "bias") is None
    if not closes or user is None or user.args[0] is not node:
        return Tail(experts.out)
    up = user.args[1]
    if not isinstance(up, Node) or dtype(up) != dtype(node) or len(shape(up)) != 2:
        return Tail(experts.out)
    return Tail(user, weight, eps, up)


def _shared(node: Node, experts: RoutedExperts) -> tuple[Shared, Node]:
    """The shared experts that are added to ``node``, and the sum."""
    rows = shape(node)
    total, chain = _only(node), []
    while total is not None and is_view(total):
        chain.append(total)
        total = _only(total)
    last = chain[-1] if chain else node
    if total is None or packet(total) != "add" or argument(total, "alpha", 1) != 1:
        raise Refused("nothing is added to the routed experts", last)
    other = next((operand for operand in total.args[:2] if operand is not last), None)
    if not isinstance(other, Node) or shape(other) != shape(total) or shape(last) != shape(total):
        raise Refused("what is added to the routed experts has another shape", total)
    closing, above = peel(other, "none")
    if packet(closing) != "linear" or argument(closing, "bias") is not None:
        raise Refused("what is added to the routed experts is no product", closing)
    ordered = layout(node, chain) == contiguous(shape(last)) and layout(closing, above) == contiguous(shape(other))
    hidden, down = closing.args[:2]
    if not ordered or not isinstance(hidden, Node) or not isinstance(down, Node):
        raise Refused("what is added to the routed experts is in another order", other)
    inner, above = peel(hidden, "float")
    gating = gating_of(inner, Frame.of("pqrs"[: len(shape(inner))]))
    bases = [{leaf.base for leaf in leaves} for leaves in (gating.gate, gating.up)]
    plain = layout(inner, above) == contiguous(shape(hidden)) and all(
        layout(leaf.base, leaf.chain) == contiguous(shape(inner)) for leaf in (*gating.gate, *gating.up)
    )
    if gating.numbers != experts.gating.numbers or not plain or any(len(found) > 1 for found in bases):
        raise Refused("the shared experts have another activation", inner)
    gate, up = (found.pop() for found in bases)
    if {dtype(item) for item in (gate, up, down, total)} != {dtype(experts.x)} or shape(down)[0] != rows[-1]:
        raise Refused("the shared experts have another type or width", closing)
    return Shared(gate, up, down), total


def _only(node: Node) -> Node | None:
    users = [user for user in node.users if packet(user) != "_assert_tensor_metadata"]
    return users[0] if len(users) == 1 else None
