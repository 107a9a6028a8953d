"""A router read from a graph: which experts a token goes to, by a top-k over biased scores, and with which weights."""

from dataclasses import dataclass

import torch
from torch.fx import Node

from kimigraph.passes.algebra.layout import Layout, contiguous, layout, peel
from kimigraph.passes.algebra.nodes import argument, constant, described, is_cast, packet, rank, shape
from kimigraph.passes.algebra.refusal import Refused
from kimigraph.passes.algebra.unify import scaling

ATEN = torch.ops.aten
GUARD = 1e-12
"""A term this small beside a sum of scores keeps it from 0 and does nothing else."""


@dataclass(frozen=True)
class Routing:
    """A choice of ``each`` of ``count`` experts: ``picks`` [N, k] and, scaled and renormalised, ``weights`` [N, k]."""

    topk: Node
    picks: Node
    weights: Node
    logits: Node
    bias: Node | None
    tokens: int
    count: int
    each: int
    renormalize: bool
    scale: float
    groups: int = 1
    group_picks: int = 1

    @property
    def pairs(self) -> int:
        """Picks of all tokens."""
        return self.tokens * self.each


def is_router(topk: Node) -> bool:
    """Whether a top-k over [N, E] hands its indices to a gather from another tensor of that shape."""
    scores = topk.args[0]
    picks = item_of(topk, 1)
    if not isinstance(scores, Node) or picks is None or rank(scores) != 2:
        return False
    return _weights_of(picks, shape(scores)) is not None


def routing_at(topk: Node) -> Routing:
    """The router around a top-k for which ``is_router`` holds. Refused where it computes something else."""
    scores, picks, each = topk.args[0], item_of(topk, 1), topk.args[1]
    assert isinstance(scores, Node) and picks is not None
    tokens, count = shape(scores)
    if argument(topk, "dim") not in (-1, 1) or argument(topk, "largest") is not True or not isinstance(each, int):
        raise Refused("the router's top-k takes something else than the largest scores of a token", topk)
    values = item_of(topk, 0)
    if values is not None and values.users:
        raise Refused("the values of the top-k are used", values)
    choice, groups, group_picks = _grouped(scores, tokens, count)
    score, bias = _biased(choice, count)
    if packet(score) != "sigmoid":
        raise Refused(f"the experts' scores are {described(score)}, not aten.sigmoid", score)
    logits = score.args[0]
    assert isinstance(logits, Node)
    chosen = _weights_of(picks, shape(scores))
    assert chosen is not None
    if chosen.args[0] is not score:
        raise Refused("the experts' weights are not the scores without bias", chosen)
    weights, renormalize = _renormalized(chosen)
    weights, scale = _scaled(weights)
    return Routing(
        topk, picks, weights, logits, bias, tokens, count, each, renormalize, scale, groups, group_picks
    )  # fmt: skip


def item_of(node: Node, number: int) -> Node | None:
    """The ``getitem`` of a node with several results, if there is one."""
    return next((user for user in node.users if packet(user) == "getitem" and user.args[1] == number), None)


def _weights_of(picks: Node, sizes: tuple[int, ...]) -> Node | None:
    for user in picks.users:
        source = user.args[0]
        if user.target is ATEN.gather.default and user.args[2] is picks and isinstance(source, Node):
            if user.args[1] in (-1, 1) and shape(source) == sizes:
                return user
    return None


def _biased(choice: Node, count: int) -> tuple[Node, Node | None]:
    """The scores, and the bias [E] that is added for the choice."""
    if packet(choice) != "add" or argument(choice, "alpha", 1) != 1:
        return choice, None
    a, b = choice.args[:2]
    for score, bias in ((a, b), (b, a)):
        if isinstance(score, Node) and isinstance(bias, Node) and shape(bias) in ((count,), (1, count)):
            return score, bias
    return choice, None


def _renormalized(chosen: Node) -> tuple[Node, bool]:
    """The chosen scores over their sum, where something divides them by it."""
    total = next((user for user in chosen.users if packet(user) == "sum"), None)
    if total is None:
        return chosen, False
    dims = argument(total, "dim")
    if list(dims or ()) not in ([-1], [1]) or not argument(total, "keepdim"):
        raise Refused("the experts' weights are summed over something else than a token's picks", total)
    denominator = total
    guard = next((user for user in total.users if packet(user) == "add"), None)
    if guard is not None:
        term = constant(guard.args[1])
        if term is None or not 0 <= term <= GUARD:
            raise Refused("the sum of the experts' weights has a term that changes it", guard)
        denominator = guard
    ratio = next((user for user in denominator.users if packet(user) == "div"), None)
    if ratio is None or ratio.args[0] is not chosen or ratio.args[1] is not denominator:
        raise Refused("the experts' weights are not divided by their sum", denominator)
    return ratio, True


def _scaled(weights: Node) -> tuple[Node, float]:
    scale = 1.0
    while len(weights.users) == 1:
        user = next(iter(weights.users))
        step = scaling(user)
        if step is None or step[0] is not weights:
            break
        weights, scale = user, scale * step[1]
    return weights, scale


def _grouped(scores: Node, tokens: int, count: int) -> tuple[Node, int, int]:
    """What the choice is made of, how many groups of experts there are, and of how many of them it takes experts."""
    if packet(scores) != "masked_fill":
        return scores, 1, 1
    choice, hidden, filling = scores.args[:3]
    if constant(filling) != float("-inf"):
        raise Refused("the experts of other groups are not masked with -inf", scores)
    if not isinstance(choice, Node) or not isinstance(hidden, Node):
        raise Refused("the experts' groups: no mask", scores)
    marked = _marked_groups(hidden, tokens, count)
    best = _argument(marked, 2, "getitem", scores)
    top = _argument(best, 0, "topk", scores)
    total = _argument(top, 0, "sum", scores)
    pair = _argument(_argument(total, 0, "getitem", scores), 0, "topk", scores)
    grouped = pair.args[0]
    groups = shape(marked)[1]
    base, chain = peel(grouped, "none") if isinstance(grouped, Node) else (pair, [])
    if base is not choice or layout(base, chain) != contiguous((tokens, groups, count // groups)):
        raise Refused("the experts' groups: they are not made of the scores in their order", pair)
    largest = all(argument(node, "largest") is True and argument(node, "dim") in (-1, rank(node.args[0]) - 1)
                  for node in (top, pair) if isinstance(node.args[0], Node))  # fmt: skip
    taken = (top.args[1], pair.args[1], best.args[1], _argument(total, 0, "getitem", scores).args[1])
    if not largest or taken[1:] != (2, 1, 0) or list(argument(total, "dim") or ()) not in ([-1], [2]):
        raise Refused("the experts' groups: a group's score is not the sum of its two best", total)
    assert isinstance(taken[0], int)
    return choice, groups, taken[0]


_FLATTENED = ("view", "reshape", "_unsafe_view", "clone", "squeeze")


def _marked_groups(hidden: Node, tokens: int, count: int) -> Node:
    """The scatter of ones [N, G] out of which a mask [N, E] over the experts of other groups is made."""
    node = hidden.args[0] if packet(hidden) in ("bitwise_not", "logical_not") else None
    while isinstance(node, Node) and (is_cast(node) or packet(node) in _FLATTENED):
        node = node.args[0]
    if isinstance(node, Node):
        base, chain = peel(node, "none")
        groups = shape(base)[1] if packet(base) == "scatter" and rank(base) == 2 else 0
        wanted = torch.empty(tokens, groups, 1, device="meta").expand(-1, -1, count // max(groups, 1))
        if groups and layout(base, chain) == Layout.of(wanted):
            if constant(base.args[0]) == 0 and base.args[1] in (1, -1) and base.args[3] == 1:
                return base
    raise Refused("the experts' groups: the mask is not made of the picked groups", hidden)


def _argument(node: Node, position: int, wanted: str, place: Node) -> Node:
    found = node.args[position]
    if not isinstance(found, Node) or packet(found) != wanted:
        raise Refused(f"the experts' groups: {described(found)} where {wanted} belongs", place)
    return found
