"""Gated activations as patterns: SwiGLU and SiTU, with or without bounds on their operands."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from kimigraph.passes.algebra.frames import Frame, Occurrence
from kimigraph.passes.algebra.layout import peel
from kimigraph.passes.algebra.match import Match, Trace
from kimigraph.passes.algebra.nodes import argument, is_number, packet, shape
from kimigraph.passes.algebra.refusal import Refused
from kimigraph.passes.algebra.unify import Either, Leaf, Number, Op, Pattern, find


@dataclass(frozen=True)
class Bounded(Pattern):
    """A pattern under a clamp from above, on both sides if ``symmetric``; the bound is the number ``limit``."""

    pattern: Pattern
    symmetric: bool

    def match(self, value: Any, frame: Frame, match: Match, trace: Trace, user: Node | None = None) -> Match | None:
        if not isinstance(value, Node):
            return None
        base, chain = peel(value, casts="float")
        if packet(base) != "clamp":
            trace.miss(match, base, "clamp")
            return None
        low, high = argument(base, "min"), argument(base, "max")
        if not is_number(high) or low != (-high if self.symmetric else None) or high <= 0:
            trace.miss(match, base, "a clamp to one positive bound")
            return None
        bounded = match.over(*chain, base).with_number("limit", float(high))
        inner = frame.below(chain).operand(shape(base))
        return None if bounded is None else self.pattern.match(base.args[0], inner, bounded, trace, base)


def _tangent(operand: Pattern, name: str) -> Pattern:
    """bound * tanh(operand / bound)."""
    return Op("mul", Op("tanh", Op("div", operand, Number(name))), Number(name))


def _silu(operand: Pattern) -> Pattern:
    return Either(Op("silu", operand), Op("mul", operand, Op("sigmoid", operand)))


_GATE, _UP = Leaf("gate", casts="float"), Leaf("up", casts="float")
SITU = Op(
    "mul",
    Op("mul", _tangent(_GATE, "beta"), Op("sigmoid", _GATE)),
    Either(_tangent(_UP, "linear_beta"), _UP),
)
SWIGLU = Either(
    Op("mul", _silu(Bounded(_GATE, symmetric=False)), Bounded(_UP, symmetric=True)),
    Op("mul", _silu(_GATE), _UP),
)


@dataclass(frozen=True)
class Gating:
    """A matched activation: its kind and numbers, where gate and up were met, and the nodes between."""

    activation: str
    beta: float
    linear_beta: float | None
    limit: float | None
    gate: Sequence[Occurrence]
    up: Sequence[Occurrence]

    @property
    def numbers(self) -> tuple[str, float, float | None, float | None]:
        """What two activations of one kind have in common."""
        return self.activation, self.beta, self.linear_beta, self.limit


def gating_of(node: Node, frame: Frame) -> Gating:
    """The activation that ends in ``node``. Refused where it is another one."""
    for activation, pattern in (("situ", SITU), ("swiglu", SWIGLU)):
        match, _ = find(pattern, node, frame)
        if match is not None:
            numbers = match.numbers
            return Gating(
                activation,
                numbers.get("beta", 1.0),
                numbers.get("linear_beta"),
                numbers.get("limit"),
                match.leaves["gate"],
                match.leaves["up"],
            )
    raise Refused("the activation is neither SwiGLU nor SiTU", node)
