"""Sizes that are known in the run alone: how many places a mask picks, and what is computed of that number."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from operator import add, floordiv, mul
from typing import Any, Generic, TypeVar

import torch
from torch import SymInt
from torch.fx.experimental.symbolic_shapes import guard_or_false

Made = TypeVar("Made")
UNBOUNDED = 10**6
"""What a size without a bound counts as, where something is estimated."""


class OpenSizeError(Exception):
    """Something needs the number that an open size is."""


@dataclass(frozen=True, eq=False)
class OpenSize:
    """A size that torch knows as an expression. Two are equal where their expressions are; no number equals one.

    A comparison is answered where it is the same for every number that the size may be; what else needs the number
    raises OpenSizeError.
    """

    symbol: SymInt

    @property
    def expression(self) -> Any:
        """What it is computed of, as sympy has it."""
        return self.symbol.node.expr

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OpenSize) and bool(self.expression == other.expression)

    def __hash__(self) -> int:
        return hash(self.expression)

    def __repr__(self) -> str:
        return str(self.expression)

    def __add__(self, other: Any) -> Any:
        return sized(self.symbol + symbol_of(other))

    def __sub__(self, other: Any) -> Any:
        return sized(self.symbol - symbol_of(other))

    def __rsub__(self, other: Any) -> Any:
        return sized(symbol_of(other) - self.symbol)

    def __mul__(self, other: Any) -> Any:
        return sized(self.symbol * symbol_of(other))

    __radd__, __rmul__ = __add__, __mul__

    def __floordiv__(self, other: Any) -> Any:
        return sized(self.symbol // symbol_of(other))

    def __lt__(self, other: Any) -> bool:
        return _answered(self, self.symbol < symbol_of(other), self.symbol >= symbol_of(other))

    def __le__(self, other: Any) -> bool:
        return _answered(self, self.symbol <= symbol_of(other), self.symbol > symbol_of(other))

    def __gt__(self, other: Any) -> bool:
        return not self <= other

    def __ge__(self, other: Any) -> bool:
        return not self < other

    def __bool__(self) -> bool:
        return bool(self.__index__())

    def __int__(self) -> int:
        return self.__index__()

    def __index__(self) -> int:
        raise OpenSizeError(f"needs the size {self!r} as a number, which the run alone knows")


def _answered(size: OpenSize, holds: Any, fails: Any) -> bool:
    if guard_or_false(holds):
        return True
    if guard_or_false(fails):
        return False
    raise OpenSizeError(f"depends on the size {size!r}, which the run alone knows")


def sized(size: Any) -> Any:
    """A size of a tensor: a number where it is known, else an OpenSize."""
    if isinstance(size, OpenSize):
        return size
    if not isinstance(size, SymInt):
        return int(size)
    known = size.node.maybe_as_int()
    return OpenSize(size) if known is None else known


def most(size: Any) -> int:
    """The largest number that a size may be; one that has no bound counts as a million."""
    if not isinstance(size, SymInt):
        return int(size)
    known = size.node.maybe_as_int()
    bound = size.node.shape_env.bound_sympy(size.node.expr).upper if known is None else known
    return int(bound) if bound < UNBOUNDED else UNBOUNDED


def symbol_of(size: Any) -> Any:
    """A size as torch takes it."""
    return size.symbol if isinstance(size, OpenSize) else size


def smaller(a: Any, b: Any) -> Any:
    """The smaller of two sizes."""
    return sized(torch.sym_min(symbol_of(a), symbol_of(b)))


def larger(a: Any, b: Any) -> Any:
    """The larger of two sizes."""
    return sized(torch.sym_max(symbol_of(a), symbol_of(b)))


def met(shapes: Iterable[tuple[Any, ...]]) -> tuple[Any, ...] | None:
    """The shape to which all broadcast; None where they do not fit, or open sizes meet others."""
    result: list[Any] = []
    for shape in shapes:
        wide = [1] * (len(shape) - len(result)) + result
        for place, size in enumerate(shape, len(wide) - len(shape)):
            if wide[place] == 1:
                wide[place] = size
            elif size not in (1, wide[place]):
                return None
        result = wide
    return tuple(result)


@dataclass
class SizeExpressions(Generic[Made]):
    """Computes open sizes in some language: each once, of the tensors that have them.

    ``measure`` gives the size of an axis of what was noted, ``pair`` an operation (``add``, ``mul``, ``floordiv``,
    ``torch.sym_min`` or ``torch.sym_max``) on two sizes, either of which may be a number.
    """

    measure: Callable[[Any, int], Made]
    pair: Callable[[Callable[..., Any], Made | int, Made | int], Made]
    _sources: dict[Any, tuple[Any, int, bool]] = field(default_factory=lambda: {})
    _made: dict[Any, Any] = field(default_factory=lambda: {})

    def note(self, source: Any, form: torch.Tensor, preferred: bool = False) -> None:
        """Learn which sizes ``form``, the value of ``source``, has. The first is asked, or the first preferred one."""
        for axis, size in enumerate(form.shape):
            if isinstance(size, SymInt) and size.node.expr.is_symbol:
                known = self._sources.get(size.node.expr)
                if known is None or (preferred and not known[2]):
                    self._sources[size.node.expr] = (source, axis, preferred)

    def of(self, size: "OpenSize") -> Made:
        """What computes ``size``."""
        made = self._of(size.expression)
        assert not isinstance(made, int)
        return made

    def _of(self, expression: Any) -> Made | int:
        if expression.is_Integer:
            return int(expression)
        if expression not in self._made:
            self._made[expression] = self._computed(expression)
        return self._made[expression]

    def _computed(self, expression: Any) -> Made:
        if expression.is_symbol:
            source, axis, _ = self._sources[expression]
            return self.measure(source, axis)
        target = _OPERATIONS.get(type(expression).__name__)
        if target is None:
            raise OpenSizeError(f"computes the size {expression}, which has no form here")
        result, *rest = (self._of(part) for part in expression.args)
        for part in rest:
            # Numbers stand on the right, as people write them.
            swap = isinstance(result, int) and target in (add, mul)
            result = self.pair(target, part, result) if swap else self.pair(target, result, part)
        assert not isinstance(result, int)
        return result


_OPERATIONS: dict[str, Callable[..., Any]] = {
    "Add": add,
    "Mul": mul,
    "Min": torch.sym_min,
    "Max": torch.sym_max,
    "FloorDiv": floordiv,
    "CleanDiv": floordiv,
}
"""What sympy's nodes are, by their class."""
