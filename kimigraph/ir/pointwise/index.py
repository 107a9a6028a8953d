"""Integer expressions over the variables of a loop nest: sums of atoms with factors, kept simple as they are built.

Atoms are variables with a known extent, quotients, remainders, and elements fetched from a tensor of indices. Bounds
are known for all of them, which is what lets ``(64 * row + column) // 64`` become ``row``.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import gcd, prod
from typing import Any


@dataclass(frozen=True)
class Variable:
    """A loop variable, from 0 to ``extent - 1``."""

    name: str
    extent: int


@dataclass(frozen=True)
class Quotient:
    """``of // by``, rounded down."""

    of: "Index"
    by: int


@dataclass(frozen=True)
class Remainder:
    """``of % by``, never negative."""

    of: "Index"
    by: int


@dataclass(frozen=True)
class Fetched:
    """An element of a tensor of indices, made to lie in 0 to ``extent - 1`` where it is used."""

    value: Any
    extent: int


@dataclass(frozen=True)
class Within:
    """``of + shift`` where that lies in 0 to ``extent - 1``; what is computed elsewhere does not matter.

    An atom while an address is simplified, since its bounds are what simplifies it; ``expanded`` takes it apart.
    """

    of: "Index"
    shift: int
    extent: int


Atom = Variable | Quotient | Remainder | Fetched | Within


@dataclass(frozen=True)
class Index:
    """``constant`` plus the sum of ``factor * atom``; terms are in a fixed order, none twice, no factor is 0."""

    terms: tuple[tuple[Atom, int], ...] = ()
    constant: int = 0
    least: int = field(default=0, init=False, compare=False, repr=False)
    """The smallest value that it can take."""
    most: int = field(default=0, init=False, compare=False, repr=False)
    """The largest value that it can take."""
    _hash: int = field(default=0, init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        low = high = self.constant
        for atom, factor in self.terms:
            first, last = _range(atom)
            low += factor * (first if factor > 0 else last)
            high += factor * (last if factor > 0 else first)
        object.__setattr__(self, "least", low)
        object.__setattr__(self, "most", high)
        object.__setattr__(self, "_hash", hash((self.terms, self.constant)))  # looked up often, and deep

    def __hash__(self) -> int:
        return self._hash

    def __add__(self, other: "Index | int") -> "Index":
        if isinstance(other, int):
            return self if other == 0 else Index(self.terms, self.constant + other)
        return _sum((*self.terms, *other.terms), self.constant + other.constant)

    def __mul__(self, factor: int) -> "Index":
        if factor == 0:
            return ZERO
        return Index(tuple((atom, factor * own) for atom, own in self.terms), factor * self.constant)

    def __floordiv__(self, by: int) -> "Index":
        return _quotient(self, by)

    def __mod__(self, by: int) -> "Index":
        return _remainder(self, by)

    def atoms(self) -> Iterable[Atom]:
        """All atoms, those inside quotients and remainders too."""
        for atom, _ in self.terms:
            yield atom
            if isinstance(atom, Quotient | Remainder | Within):
                yield from atom.of.atoms()


ZERO = Index()


def constant(value: int) -> Index:
    """A number."""
    return Index((), value)


def of(atom: Atom) -> Index:
    """An atom by itself; a variable that takes one value only is that value."""
    if isinstance(atom, Variable) and atom.extent == 1:
        return ZERO
    return Index(((atom, 1),))


def within(index: Index, shift: int, extent: int) -> Index:
    """``index + shift`` for a place where it is known to lie in 0 to ``extent - 1``."""
    if index.least + shift >= 0 and index.most + shift < extent:
        return index + shift
    return ZERO if extent == 1 else of(Within(index, shift, extent))


def expanded(index: Index) -> Index:
    """The index without ``Within``: what is left is arithmetic on loop variables and fetched elements."""
    if not any(isinstance(atom, Within) for atom in index.atoms()):
        return index
    total = Index((), index.constant)
    for atom, factor in index.terms:
        part = of(atom)
        if isinstance(atom, Within):
            part = expanded(atom.of) + atom.shift
        elif isinstance(atom, Quotient):
            part = expanded(atom.of) // atom.by
        elif isinstance(atom, Remainder):
            part = expanded(atom.of) % atom.by
        total = total + part * factor
    return total


def evaluated(index: Index, variables: Mapping[str, int]) -> int:
    """The value of an index without fetched elements; variables that are not given are 0."""
    total = index.constant
    for atom, factor in index.terms:
        if isinstance(atom, Variable):
            total += factor * variables.get(atom.name, 0)
        elif isinstance(atom, Quotient):
            total += factor * (evaluated(atom.of, variables) // atom.by)
        elif isinstance(atom, Remainder):
            total += factor * (evaluated(atom.of, variables) % atom.by)
        elif isinstance(atom, Within):
            total += factor * (evaluated(atom.of, variables) + atom.shift)
    return total


def flattened(index: Sequence[Index], shape: Sequence[int]) -> Index:
    """The row-major position of an element."""
    total, step = ZERO, 1
    for position, size in zip(reversed(index), reversed(shape), strict=True):
        total, step = total + position * step, step * size
    return total


def unflattened(position: Index, shape: Sequence[int]) -> tuple[Index, ...]:
    """The index of the element at a row-major position below ``prod(shape)``."""
    found: list[Index] = []
    step = prod(shape)
    for size in shape:
        step //= max(size, 1)
        found.append(ZERO if size == 1 else (position // step) % size)
    return tuple(found)


def _range(atom: Atom) -> tuple[int, int]:
    if isinstance(atom, Variable | Fetched | Within):
        return 0, atom.extent - 1
    low, high = atom.of.least, atom.of.most
    if isinstance(atom, Quotient):
        return low // atom.by, high // atom.by
    return 0, min(atom.by - 1, high) if low >= 0 else atom.by - 1


def _sum(terms: Iterable[tuple[Atom, int]], total: int) -> Index:
    factors: dict[Atom, int] = {}
    for atom, factor in terms:
        factors[atom] = factors.get(atom, 0) + factor
    merged = Index(tuple(sorted(((a, f) for a, f in factors.items() if f), key=_order)), total)
    while (simpler := _recombined(merged)) is not None:
        merged = simpler
    return merged


def _order(term: tuple[Atom, int]) -> tuple[int, str]:
    return -abs(term[1]), spelled(term[0])


def spelled(atom: Atom) -> str:
    """An atom in a form that orders atoms the same way in every process."""
    if isinstance(atom, Variable):
        return atom.name
    if isinstance(atom, Fetched):
        return f"fetched {atom.value.number}"
    if isinstance(atom, Within):
        return f"{' + '.join(f'{factor} * {spelled(part)}' for part, factor in atom.of.terms)} + {atom.shift}"
    sign = "//" if isinstance(atom, Quotient) else "%"
    inner = " + ".join(f"{factor} * {spelled(part)}" for part, factor in atom.of.terms)
    return f"({inner} + {atom.of.constant}) {sign} {atom.by}"


def _recombined(index: Index) -> Index | None:
    """Two terms that are one: ``n * (e // n) + e % n`` is ``e``, and the same inside a remainder."""
    lower = [(atom, factor) for atom, factor in index.terms if isinstance(atom, Remainder)]
    for atom, factor in index.terms if lower else ():
        for partner, weight in lower:
            if partner is not atom and factor == weight * partner.by:
                whole = _joined(atom, partner)
                if whole is not None:
                    rest = [(a, f) for a, f in index.terms if a is not atom and a is not partner]
                    added = whole * weight
                    return _sum((*rest, *added.terms), index.constant + added.constant)
    return None


def _joined(upper: Atom, lower: Remainder) -> Index | None:
    """The number of which ``upper`` is the part above ``lower.by`` and ``lower`` the part below it, if there is one."""
    if isinstance(upper, Quotient) and upper.by % lower.by == 0:
        whole = _quotient(upper.of, upper.by // lower.by)
        return whole if whole == lower.of else None
    if isinstance(upper, Remainder) and len(upper.of.terms) == 1 and upper.of.constant == 0:
        inner, factor = upper.of.terms[0]
        if factor == 1 and isinstance(inner, Quotient) and inner.by % lower.by == 0:
            whole = _quotient(inner.of, inner.by // lower.by)
            return _remainder(whole, lower.by * upper.by) if whole == lower.of else None
    return None


def _low_part(index: Index, by: int) -> tuple[Index, Index, int] | None:
    """(high, low, g): the index in two parts where g divides ``high`` and ``by``, and low lies in 0 to g - 1."""
    for cut in range(len(index.terms)):
        high, low = index.terms[: len(index.terms) - cut], index.terms[len(index.terms) - cut :]
        divisor = gcd(by, *(factor for _, factor in high))
        lower = Index(low, index.constant % divisor)
        if divisor > 1 and lower.least >= 0 and lower.most < divisor:
            return Index(high, index.constant - lower.constant), lower, divisor
    return None


def _quotient(index: Index, by: int) -> Index:
    if by == 1:
        return index
    whole = tuple((atom, factor // by) for atom, factor in index.terms if factor % by == 0)
    rest = Index(tuple(term for term in index.terms if term[1] % by), index.constant % by)
    outside = _sum(whole, index.constant // by)
    if not rest.terms:
        return outside
    if rest.least >= 0 and rest.most < by:
        return outside
    parts = _low_part(rest, by)
    if parts is not None:
        high, _, divisor = parts
        return outside + _quotient(_divided(high, divisor), by // divisor)
    (atom, factor), *more = rest.terms
    if not more and factor == 1 and rest.constant == 0:
        if isinstance(atom, Quotient):
            return outside + _quotient(atom.of, atom.by * by)
        if isinstance(atom, Remainder) and atom.by % by == 0:
            return outside + _remainder(_quotient(atom.of, by), atom.by // by)
    return outside + of(Quotient(rest, by))


def _remainder(index: Index, by: int) -> Index:
    if by == 1:
        return ZERO
    rest = Index(tuple((a, f % by if f > 0 else f) for a, f in index.terms if f % by), index.constant % by)
    if rest.least >= 0 and rest.most < by:
        return rest
    parts = _low_part(rest, by)
    if parts is not None:
        high, low, divisor = parts
        return _remainder(_divided(high, divisor), by // divisor) * divisor + low
    (atom, factor), *more = rest.terms
    if not more and factor == 1 and rest.constant == 0 and isinstance(atom, Remainder) and atom.by % by == 0:
        return _remainder(atom.of, by)
    return of(Remainder(rest, by))


def _divided(index: Index, by: int) -> Index:
    return Index(tuple((atom, factor // by) for atom, factor in index.terms), index.constant // by)
