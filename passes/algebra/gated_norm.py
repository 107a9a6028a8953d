"""What may follow a read-out: RMS norm and sigmoid gate, which ``kda_decode`` takes along."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.fx import Node

from kimigraph.passes.algebra.delta_rule import squared
from kimigraph.passes.algebra.frames import Frame, Operand, operand, require_layout
from kimigraph.passes.algebra.match import Match
from kimigraph.passes.algebra.nodes import COPIES, dtype, is_cast, is_view, packet, rank, shape
from kimigraph.passes.algebra.refusal import Refused
from kimigraph.passes.algebra.unify import Leaf, Number, Op, Pattern, Sum, find

_X = Leaf("o", casts="float")
_NORMED = Op(
    "mul",
    Op("mul", _X, Op("rsqrt", Op("add", Sum(squared(_X), "v", "mean"), Number("norm_eps")))),
    Leaf("norm_weight", constant_along="bsh"),
)
_GATE = Op("sigmoid", Leaf("out_gate"))
CHOICES: tuple[Pattern, ...] = (Op("mul", _NORMED, _GATE), _NORMED, Op("mul", _X, _GATE))
"""What is looked for, the most first."""

STEPS = frozenset(("mul", "pow", "square", "mean", "add", "rsqrt", "_to_copy", "to"))
DEPTH = 10


@dataclass(frozen=True)
class Neighbours:
    """``out`` is the last node taken along, ``path`` the nodes up to it; the operands are None for what is absent."""

    out: Node
    out_gate: Operand | None
    norm_weight: Operand | None
    norm_eps: float | None
    path: tuple[Node, ...]


def neighbours_of(core: Node, sizes: dict[str, int]) -> Neighbours:
    """Norm and gate behind a read-out whose base is ``core``; the read-out alone when neither matches."""
    following = list(_following(core))
    for pattern in CHOICES:
        for node in reversed(following):
            found = _matched(pattern, node, core, sizes)
            if found is not None:
                return found
    return Neighbours(core, None, None, None, ())


def returned_as(node: Node, returned: torch.dtype | None) -> Node:
    """The node whose uses the operator takes: ``node``, or the cast of it to the type that the operator returns."""
    while dtype(node) != returned:
        users = list(node.users)
        if len(users) != 1 or not (is_cast(users[0]) or is_view(users[0])):
            raise Refused(f"the result is used as {dtype(node)}, kda_decode returns {returned}", node)
        node = users[0]
    return node


def _following(core: Node) -> Iterator[Node]:
    """The products that a read-out goes into, near ones first."""
    level, seen = [core], {core}
    for _ in range(DEPTH):
        level = [user for node in level for user in node.users if _passes(user) and user not in seen]
        seen.update(level)
        yield from (node for node in dict.fromkeys(level) if packet(node) == "mul")


def _passes(node: Node) -> bool:
    return packet(node) in STEPS or is_view(node) or is_cast(node) or node.target in COPIES


def _matched(pattern: Pattern, node: Node, core: Node, sizes: dict[str, int]) -> Neighbours | None:
    axes = {4: "bshv", 3: "bhv"}.get(rank(node))
    if axes is None or shape(node) != tuple(sizes[axis] for axis in axes):
        return None
    match, _trace = find(pattern, node, Frame.of(axes))
    if match is None or match.base("o") is not core:
        return None
    try:
        return _operands(match, node, sizes, axes)
    except Refused:
        return None


def _operands(match: Match, node: Node, sizes: dict[str, int], axes: str) -> Neighbours:
    row = sizes["h"] * sizes["v"]
    strides = {"b": sizes["s"] * row, "s": row, "h": sizes["v"], "v": 1}
    for leaf in match.leaves["o"]:
        require_layout("the read-out", leaf, {axis: strides[axis] if sizes[axis] > 1 else 0 for axis in strides})
    gate = weight = None
    if "out_gate" in match.leaves:
        want = [sizes[axis] for axis in "bshv"]
        gate = operand("the output gate", match.leaf("out_gate"), axes, sizes, want)
    if "norm_weight" in match.leaves:
        weight = operand("the norm's weight", match.leaf("norm_weight"), "v", sizes)
    return Neighbours(node, gate, weight, match.numbers.get("norm_eps"), match.path)
