"""A mask as a conjunction of atoms, whatever logic spells it.

A bool mask may say what to keep or what to hide, a float mask is added to scores; negation, and, or, where,
masked_fill and sums of additive masks are taken apart, so that masks can be compared as sets.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.fx import Node

from kimigraph.passes.algebra.layout import Broadcast, Step, layout
from kimigraph.passes.algebra.nodes import (
    COPIES,
    MASKED,
    argument,
    constant,
    dtype,
    is_cast,
    is_number,
    is_view,
    packet,
    rank,
    shape,
)

Sense = Literal["keep", "drop", "add"]
"""What True (or the value) of a mask means: visible, hidden, or a term added to the score."""

PICKING = ("picks", "counted")
COMPARISONS = frozenset(("le", "lt", "ge", "gt"))


@dataclass(frozen=True)
class Atom:
    """One condition of a conjunction.

    ``kind``: "picks" (membership in a list of indices, ``index`` the list), "counted" (the same by scatter_add,
    ``index`` the scatter_add), "compare" (a comparison that must hold), "keep", "drop" or "add" (a tensor of that sense
    that says no more). ``chain`` leads from ``node`` to the mask's frame.
    """

    kind: str
    node: Node
    chain: tuple[Step, ...]
    index: Node | None = None

    def key(self) -> tuple[Any, ...]:
        """Equal for equal conditions: the node and how it varies, without broadcast dims and dims of size 1."""
        found = layout(self.node, self.chain)
        if found is None:
            return (self.kind, self.node, self.chain)
        dims = tuple((size, stride) for size, stride in zip(found.shape, found.strides, strict=True) if stride)
        return (self.kind, self.node, dims, found.offset)


def sense_of(mask: Node) -> Sense:
    """The sense of an attention mask operand: bool keeps, float is added."""
    return "keep" if dtype(mask) is torch.bool else "add"


def atoms(node: Node, sense: Sense, chain: Sequence[Step] = ()) -> list[Atom]:
    """The conjunction that a mask stands for; an empty list hides nothing."""
    chain = tuple(chain)
    if is_view(node) or node.target in COPIES or (is_cast(node) and dtype(node) == dtype(_first(node))):
        return atoms(_first(node), sense, (node, *chain))
    found = _additive(node, chain) if sense == "add" else _logical(node, sense, chain)
    return found if found is not None else [Atom(sense, node, chain)]


def _first(node: Node) -> Node:
    source = node.args[0]
    assert isinstance(source, Node)
    return source


def _below(node: Node, chain: tuple[Step, ...]) -> tuple[Step, ...]:
    """The chain of an operand of the elementwise ``node``."""
    return (Broadcast(shape(node)), *chain)


def _logical(node: Node, sense: Sense, chain: tuple[Step, ...]) -> list[Atom] | None:
    keep = sense == "keep"
    value = constant(node)
    if value is not None and bool(value) == keep:
        return []
    name = packet(node)
    if name in ("bitwise_not", "logical_not"):
        return atoms(_first(node), "drop" if keep else "keep", chain)
    both = ("__and__", "bitwise_and", "logical_and") if keep else ("__or__", "bitwise_or", "logical_or")
    if name in both and isinstance(node.args[1], Node):
        below = _below(node, chain)
        return atoms(_first(node), sense, below) + atoms(node.args[1], sense, below)
    if name == "scatter" and _marks(node, keep):
        return [Atom("picks", node, chain, argument(node, "index"))]
    counted = _counted(node, keep)
    if counted is not None:
        return [Atom("counted", node, chain, counted)]
    if keep and name in COMPARISONS:
        return _hidden_values(node, chain) or [Atom("compare", node, chain)]
    return None


def _marks(node: Node, keep: bool) -> bool:
    """Whether a scatter along the last dim writes the keeping value over a tensor of the hiding value."""
    value = argument(node, "value")
    last = argument(node, "dim") in (-1, rank(node) - 1)
    base = constant(node.args[0])
    return isinstance(value, bool | int) and last and bool(value) == keep and base is not None and bool(base) != keep


def _counted(node: Node, keep: bool) -> Node | None:
    """The scatter_add whose non-zero places a comparison with 0 keeps (or whose zeros it hides)."""
    source = node.args[0] if node.args else None
    if (
        not isinstance(source, Node)
        or packet(source) != "scatter_add"
        or len(node.args) < 2
        or constant(node.args[1]) != 0
    ):
        return None
    return source if packet(node) in (("ne", "gt") if keep else ("eq", "le")) else None


def _hidden_values(node: Node, chain: tuple[Step, ...]) -> list[Atom] | None:
    """The atoms of an additive mask that a comparison turned into a bool: ``mask > -1e30``."""
    source = node.args[0]
    if packet(node) != "gt" or not isinstance(source, Node) or not is_number(node.args[1]):
        return None
    value = source.meta["val"]
    return atoms(source, "add", chain) if value.is_floating_point() and node.args[1] == MASKED else None


def _additive(node: Node, chain: tuple[Step, ...]) -> list[Atom] | None:
    if constant(node) == 0:
        return []
    name = packet(node)
    if name == "where":
        condition, kept, hidden = node.args[:3]
        if isinstance(condition, Node) and constant(kept) == 0 and hides(hidden):
            return atoms(condition, "keep", _below(node, chain))
        if isinstance(condition, Node) and constant(hidden) == 0 and hides(kept):
            return atoms(condition, "drop", _below(node, chain))
    if name == "masked_fill" and hides(node.args[2]) and isinstance(node.args[1], Node):
        below = _below(node, chain)
        return atoms(_first(node), "add", below) + atoms(node.args[1], "drop", below)
    if name == "add" and isinstance(node.args[1], Node) and argument(node, "alpha", 1) == 1:
        below = _below(node, chain)
        return atoms(_first(node), "add", below) + atoms(node.args[1], "add", below)
    return None


def hides(value: Any) -> bool:
    """Whether a constant, as a score or an additive mask, hides a key."""
    found = constant(value)
    return found is not None and found <= MASKED


@dataclass(frozen=True)
class MaskTerm:
    """One mask that a score passes on its way: the tensor, its sense, and the masked score."""

    node: Node
    sense: Sense
    score: Node


def mask_step(node: Node) -> list[tuple[Node, MaskTerm]]:
    """The ways in which ``node`` may be a masked score: (score below, mask). Empty when it is none.

    masked_fill and where have one way; of a sum either term may be the score.
    """
    name = packet(node)
    if name == "masked_fill" and hides(node.args[2]) and isinstance(node.args[1], Node):
        return [(_first(node), MaskTerm(node.args[1], "drop", node))]
    if name == "where":
        condition, yes, no = node.args[:3]
        if isinstance(condition, Node) and isinstance(yes, Node) and hides(no):
            return [(yes, MaskTerm(condition, "keep", node))]
        if isinstance(condition, Node) and isinstance(no, Node) and hides(yes):
            return [(no, MaskTerm(condition, "drop", node))]
    if name == "add" and len(node.args) == 2 and argument(node, "alpha", 1) == 1:
        left, right = node.args
        if isinstance(left, Node) and isinstance(right, Node):
            return [(left, MaskTerm(right, "add", node)), (right, MaskTerm(left, "add", node))]
    return []


def selects(masks: Sequence[MaskTerm]) -> bool:
    """Whether a list of picks is among the conditions of some masks."""
    conditions = [atom for mask in masks for atom in atoms(mask.node, mask.sense)]
    return any(atom.kind in PICKING for atom in conditions)


def is_mask(node: Node) -> bool:
    """Whether the node is nothing but a mask: bool, or an additive mask made of conditions alone."""
    return dtype(node) is torch.bool or all(atom.kind != "add" for atom in atoms(node, "add"))


def missing(found: Sequence[Atom], among: Sequence[Atom]) -> list[Atom]:
    """The atoms of ``found`` that are none of ``among``."""
    known = {atom.key() for atom in among}
    return [atom for atom in found if atom.key() not in known]
