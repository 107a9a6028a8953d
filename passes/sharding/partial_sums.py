"""Where the addends of several ranks are best summed up: as far behind as they stay addends, where they are fewest."""

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from kimigraph.ir.mesh import COLLECTIVES
from kimigraph.passes.algebra.nodes import argument, packet
from kimigraph.passes.algebra.rewrite import call

C10D: Any = getattr(torch.ops, COLLECTIVES)
_VIEWS = frozenset(
    ("view", "_unsafe_view", "reshape", "transpose", "permute", "unsqueeze", "squeeze", "slice", "select", "expand")
)
_COPIES = frozenset(("clone", "contiguous"))
_PRODUCTS = frozenset(("mul", "bmm", "mm", "matmul"))


def sum_behind(addend: Node, group: str) -> Node:
    """Sum ``addend`` up over the ranks of ``group``, there or behind what is linear in it; the sum.

    Everything that the sum is carried past has one reader and is linear: views, products with what ranks have alike.
    """
    path = [addend]
    while (user := _only_linear_user(path[-1])) is not None:
        path.append(user)
    least = min(node.meta["val"].nbytes for node in path)
    place = next(node for node in reversed(path) if node.meta["val"].nbytes == least)
    users = list(place.users)
    pending = call(place.graph, C10D.all_reduce.default, (place, "sum", group), like=place, after=place)
    whole = call(place.graph, C10D.wait_tensor.default, (pending,), like=place, after=pending)
    for user in users:
        user.replace_input_with(place, whole)
    return whole


def _only_linear_user(node: Node) -> Node | None:
    if len(node.users) != 1:
        return None
    [user] = node.users
    if user.op != "call_function" or user.all_input_nodes.count(node) != 1:
        return None
    rule = _RULES.get(packet(user))
    return user if rule is not None and rule(user, node) else None


def _first(user: Node, node: Node) -> bool:
    return user.args[0] is node


def _product(user: Node, node: Node) -> bool:
    """One factor is an addend, the other one is not (it would be in the arguments twice)."""
    return sum(item is node for item in user.args) == 1


def _linear(user: Node, node: Node) -> bool:
    return user.args[0] is node and argument(user, "bias") is None


_RULES: dict[str, Callable[[Node, Node], bool]] = {
    **dict.fromkeys(_VIEWS | _COPIES, _first),
    **dict.fromkeys(_PRODUCTS, _product),
    "linear": _linear,
}
