"""Patterns over subgraphs: commutative, blind to views, copies and casts, with every leaf's layout kept for the check.

A pattern is matched from its result downwards. The same leaf name twice must be the same tensor. Where a match fails
the trace keeps the failures, so that a near miss can be explained.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from kimigraph.passes.algebra.frames import Frame, Occurrence, fresh
from kimigraph.passes.algebra.layout import peel
from kimigraph.passes.algebra.match import Match, Trace
from kimigraph.passes.algebra.nodes import argument, constant, packet, rank, shape

COMMUTATIVE = frozenset(("add", "mul"))
PRODUCTS = frozenset(("matmul", "bmm", "mm", "mv", "linear"))


@dataclass(frozen=True)
class Pattern:
    """Base of all patterns."""

    def match(self, value: Any, frame: Frame, match: Match, trace: Trace, user: Node | None = None) -> Match | None:
        """Extend ``match`` by this pattern at ``value`` (a node or a number), or None."""
        raise NotImplementedError


@dataclass(frozen=True)
class Leaf(Pattern):
    """Any tensor, bound below its views and casts, that does not vary along the axes ``constant_along``.

    ``casts`` as in ``layout.peel``: roundings between float types belong to the operand unless "float" says otherwise.
    """

    name: str
    constant_along: str = ""
    casts: str = "widening"

    def match(self, value: Any, frame: Frame, match: Match, trace: Trace, user: Node | None = None) -> Match | None:
        if not isinstance(value, Node):
            return None
        base, chain = peel(value, self.casts)
        occurrence = Occurrence(value, base, tuple(chain), frame, user)
        if self.constant_along:
            found = occurrence.strides()
            if found is None or any(found[0].get(axis, 0) for axis in self.constant_along):
                trace.miss(match, base, f"'{self.name}' that is the same along {self.constant_along}")
                return None
        extended = match.with_leaf(self.name, occurrence)
        if extended is None:
            trace.miss(match, base, f"the same '{self.name}' as before ({match.base(self.name).name})")
        return extended


@dataclass(frozen=True)
class Number(Pattern):
    """A constant; ``name`` binds its value."""

    name: str

    def match(self, value: Any, frame: Frame, match: Match, trace: Trace, user: Node | None = None) -> Match | None:
        found = constant(value)
        return None if found is None else match.with_number(self.name, float(found))


@dataclass(frozen=True)
class Literal(Pattern):
    """A constant of that value."""

    value: float

    def match(self, value: Any, frame: Frame, match: Match, trace: Trace, user: Node | None = None) -> Match | None:
        return match if constant(value) == self.value else None


@dataclass(frozen=True, init=False)
class Op(Pattern):
    """An elementwise operation of that name over operand patterns, in either order if it commutes."""

    name: str
    operands: tuple[Pattern, ...]

    def __init__(self, name: str, *operands: Pattern) -> None:
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "operands", operands)

    def match(self, value: Any, frame: Frame, match: Match, trace: Trace, user: Node | None = None) -> Match | None:
        if not isinstance(value, Node):
            return None
        base, chain = peel(value, casts="float")
        if self.name == "mul" and is_outer_product(base):
            return Sum(self, "one").match(value, frame, match, trace, user)
        if packet(base) != self.name or not _plain(base, len(self.operands)):
            trace.miss(match, base, self.name)
            return None
        inner = frame.below(chain).operand(shape(base))
        given = list(base.args[: len(self.operands)])
        orders = [given, given[::-1]] if self.name in COMMUTATIVE else [given]
        return _first(orders, self.operands, [inner] * len(given), match.over(*chain, base), trace, base)


def is_outer_product(node: Node) -> bool:
    """Whether a node is a matrix product over a single element, which is a broadcast product."""
    left = node.args[0] if packet(node) in ("matmul", "bmm", "mm") else None
    return isinstance(left, Node) and rank(left) >= 2 and shape(left)[-1] == 1


def _plain(node: Node, operands: int) -> bool:
    """Whether a call has that many operands and every further argument at its default."""
    if len(node.args) < operands:
        return False
    declared = getattr(getattr(node.target, "_schema", None), "arguments", ())
    further = [
        argument(node, item.name) == item.default_value for item in declared[operands:] if item.has_default_value()
    ]
    return all(further)


def _first(
    orders: Sequence[Sequence[Any]],
    patterns: Sequence[Pattern],
    frames: Sequence[Frame],
    match: Match,
    trace: Trace,
    user: Node,
) -> Match | None:
    for order in orders:
        found: Match | None = match
        for value, pattern, frame in zip(order, patterns, frames, strict=True):
            found = None if found is None else pattern.match(value, frame, found, trace, user)
        if found is not None:
            return found
    return None


@dataclass(frozen=True)
class Sum(Pattern):
    """A sum (or mean) over one dim, which becomes ``axis`` of the frame; of a product also as a matrix product."""

    operand: Pattern
    axis: str
    reduction: str = "sum"

    def match(self, value: Any, frame: Frame, match: Match, trace: Trace, user: Node | None = None) -> Match | None:
        if not isinstance(value, Node):
            return None
        base, chain = peel(value, casts="float")
        inner, deeper = frame.below(chain), match.over(*chain, base)
        axis = fresh(self.axis, inner.axes)
        if packet(base) == self.reduction:
            return self._reduced(base, inner, axis, deeper, trace)
        if packet(base) in PRODUCTS and self.reduction == "sum":
            return self._product(base, inner, axis, deeper, trace)
        trace.miss(match, base, f"a {self.reduction} over axis {self.axis}")
        return None

    def _reduced(self, base: Node, frame: Frame, axis: str, match: Match, trace: Trace) -> Match | None:
        dims, source = argument(base, "dim"), base.args[0]
        if not isinstance(dims, list | tuple) or len(dims) != 1 or not isinstance(source, Node):
            trace.miss(match, base, f"a {self.reduction} over one dim")
            return None
        dim = dims[0] % rank(source)
        reduced = frame.reduced(dim, bool(argument(base, "keepdim", False)), axis)
        return self.operand.match(source, reduced, match, trace, base)

    def _product(self, base: Node, frame: Frame, axis: str, match: Match, trace: Trace) -> Match | None:
        left, right = base.args[0], base.args[1]
        factors = self.operand.operands if isinstance(self.operand, Op) and self.operand.name == "mul" else ()
        if not isinstance(left, Node) or not isinstance(right, Node) or len(factors) != 2:
            return None
        sizes = shape(base)
        if packet(base) == "linear" and argument(base, "bias") is None and rank(right) == 2:
            frames = frame.left(sizes, axis), frame.row(sizes, axis)
        elif packet(base) != "linear" and rank(right) == 1:
            frames = frame.row(sizes, axis), frame.row(sizes, axis)
        elif packet(base) == "linear" or rank(left) < 2 or len(sizes) < 2:
            trace.miss(match, base, "a product of matrices")
            return None
        else:
            frames = frame.left(sizes, axis), frame.right(sizes, axis)
        straight = _first([(left, right)], factors, frames, match, trace, base)
        return straight or _first([(right, left)], factors, frames[::-1], match, trace, base)


@dataclass(frozen=True, init=False)
class Either(Pattern):
    """The first of several patterns that matches."""

    choices: tuple[Pattern, ...]

    def __init__(self, *choices: Pattern) -> None:
        object.__setattr__(self, "choices", choices)

    def match(self, value: Any, frame: Frame, match: Match, trace: Trace, user: Node | None = None) -> Match | None:
        for choice in self.choices:
            found = choice.match(value, frame, match, trace, user)
            if found is not None:
                return found
        return None


@dataclass(frozen=True)
class Bind(Pattern):
    """A pattern whose result is a leaf too. Met again, the same tensor need not be matched again."""

    name: str
    pattern: Pattern

    def match(self, value: Any, frame: Frame, match: Match, trace: Trace, user: Node | None = None) -> Match | None:
        if not isinstance(value, Node):
            return None
        base, chain = peel(value, casts="float")
        known = self.name in match.leaves
        extended = match.with_leaf(self.name, Occurrence(value, base, tuple(chain), frame, user))
        if extended is None or known:
            return extended
        return self.pattern.match(value, frame, extended, trace, user)


@dataclass(frozen=True)
class Scaled(Pattern):
    """A pattern times positive constants, which multiply up under ``name``."""

    name: str
    pattern: Pattern

    def match(self, value: Any, frame: Frame, match: Match, trace: Trace, user: Node | None = None) -> Match | None:
        factor = 1.0
        while isinstance(value, Node):
            base, chain = peel(value, casts="float")
            step = scaling(base)
            if step is None:
                break
            if step[1] <= 0:
                trace.miss(match, base, f"a positive factor instead of {step[1]}")
                return None
            frame = frame.below(chain).operand(shape(base))
            match, user = match.over(*chain, base), base
            value, factor = step[0], factor * step[1]
        scaled = match.with_number(self.name, factor)
        return None if scaled is None else self.pattern.match(value, frame, scaled, trace, user)


def scaling(node: Node) -> tuple[Node, float] | None:
    """(tensor, factor) of a multiplication or division by a constant; None of anything else."""
    name = packet(node)
    if name not in ("mul", "div") or len(node.args) < 2 or node.kwargs.get("rounding_mode"):
        return None
    left, right = node.args[0], node.args[1]
    factor = constant(right)
    if isinstance(left, Node) and factor is not None and factor != 0:
        return left, float(factor) if name == "mul" else 1.0 / float(factor)
    factor = constant(left)
    if name == "mul" and isinstance(right, Node) and factor is not None:
        return right, float(factor)
    return None


def find(pattern: Pattern, value: Node, frame: Frame, match: Match | None = None) -> tuple[Match | None, Trace]:
    """Match a pattern at a node; the trace explains a failure."""
    trace = Trace()
    return pattern.match(value, frame, match or Match(), trace), trace
