"""Scalar values of a region, each made once: what is loaded, computed and reduced."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from kimigraph.ir.pointwise.index import Fetched, Index, Variable, expanded

COLUMN = "column"
"""Name of the variable that a reduction runs over; where there are several, what their names begin with."""

PRODUCT = "product"
"""The sum of the products of two values along a variable."""

REDUCTIONS = ("sum", "max", "min", PRODUCT)
"""Operations along a variable, which is their ``detail``."""

NARROW = (torch.bfloat16, torch.float16)
"""Types whose values are held as fp32 numbers that the type can hold."""

_FOLDED: dict[str, Callable[..., torch.Tensor]] = {
    **{op: getattr(torch, op) for op in ("add", "sub", "mul", "div", "neg", "abs", "floor", "ceil", "sqrt", "rsqrt")},
    **{op: getattr(torch, op) for op in ("exp", "exp2", "log", "log2", "log1p", "sin", "cos", "erf", "tanh")},
    **{op: getattr(torch, op) for op in ("lt", "le", "gt", "ge", "eq", "ne")},
    "ratio": torch.div,
    "and": torch.bitwise_and,
    "or": torch.bitwise_or,
    "xor": torch.bitwise_xor,
    "not": torch.bitwise_not,
    "quotient": lambda a, b: torch.div(a, b, rounding_mode="trunc"),
    "rest": torch.fmod,
}
"""What operations on constants compute."""

Condition = tuple[Index, int, int]
"""An index and the range (low inclusive, high exclusive) in which it must lie."""

Guard = tuple[Condition, ...]
"""Conditions that all hold where a value matters; elsewhere nothing is loaded."""


@dataclass(frozen=True)
class Load:
    """An element of an outside tensor: its address in elements from the tensor's first."""

    buffer: Node
    address: Index
    guard: Guard = ()


@dataclass(eq=False)
class Value:
    """One value: an operation over others.

    ``dtype`` is the type that eager gives it: a bf16 or fp16 value is held in fp32 and has been rounded to its type.
    ``detail`` is a ``Load``, an ``Index``, a number or a dtype, as the operation wants. ``axes`` names the variables on
    which it depends. ``number`` counts values in the order in which they were made, arguments first; ``node`` is the
    graph node that it belongs to.
    """

    number: int
    op: str
    args: tuple["Value", ...]
    dtype: torch.dtype
    detail: Any
    axes: frozenset[str]
    node: Node | None


class Values:
    """Makes values, each one once."""

    def __init__(self) -> None:
        self._known: dict[Any, Value] = {}
        self.all: list[Value] = []

    def make(
        self,
        op: str,
        args: Sequence[Value] = (),
        dtype: torch.dtype = torch.float32,
        detail: Any = None,
        node: Node | None = None,
    ) -> Value:
        """The value of that operation over those values; a constant where those are constants."""
        known = self._folded(op, args, dtype)
        if known is not None:
            return known
        key = (op, tuple(value.number for value in args), dtype, type(detail), detail)
        if key not in self._known:
            axes = frozenset[str]().union(*(value.axes for value in args), _axes(detail))
            if op in REDUCTIONS:
                axes -= {detail.name}
            value = Value(len(self.all), op, tuple(args), dtype, detail, axes, node)
            self._known[key] = value
            self.all.append(value)
        return self._known[key]

    def _folded(self, op: str, args: Sequence[Value], dtype: torch.dtype) -> Value | None:
        """The value without an operation, where operands that are constants make one needless."""
        constants = [value.detail[1] if value.op == "constant" else None for value in args]
        if op == "where" and constants[0] is not None:
            return args[1 if constants[0] else 2]
        if op in ("and", "or", "xor") and dtype is torch.bool:
            for constant, other in zip(constants, reversed(args), strict=True):
                if constant is not None and (op != "xor" or not constant):
                    return other if bool(constant) == (op == "and") else self.constant(op == "or", dtype)
        if not args or None in constants or op not in _FOLDED:
            return None
        tensors = [torch.tensor(c, dtype=_held(v.dtype)) for c, v in zip(constants, args, strict=True)]
        return self.constant(_FOLDED[op](*tensors).item(), dtype)

    def constant(self, number: float | int | bool, dtype: torch.dtype) -> Value:
        """A number, as the type holds it."""
        if dtype is torch.bool:
            number = bool(number)
        elif dtype in NARROW:
            number = float(torch.tensor(float(number), dtype=dtype).item())
        elif dtype.is_floating_point:
            number = float(number)
        else:
            number = int(number)
        # -0.0 and 0.0 are one dictionary key
        return self.make("constant", (), dtype, (repr(number), number))

    def convert(self, value: Value, dtype: torch.dtype, node: Node | None = None) -> Value:
        """The value in another type, rounded to it; what widens a held value costs nothing."""
        source = value.dtype
        if source is dtype or (source in NARROW and dtype is torch.float32):
            return value
        if value.op == "constant":
            return self.constant(value.detail[1], dtype)
        return self.make("convert", (value,), dtype, dtype, node)


def _held(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype.is_floating_point else dtype


def axes_of(index: Index) -> frozenset[str]:
    """The variables on which an index depends."""
    found: set[str] = set()
    for atom in index.atoms():
        if isinstance(atom, Variable):
            found.add(atom.name)
        elif isinstance(atom, Fetched):
            found |= atom.value.axes
    return frozenset(found)


def is_column(axis: str) -> bool:
    """Whether a variable is one that reductions run over."""
    return axis.startswith(COLUMN)


def fetched_by(index: Index) -> list[Value]:
    """The elements of index tensors that an index takes, in order."""
    return [atom.value for atom in index.atoms() if isinstance(atom, Fetched)]


def simple_guard(conditions: Sequence[Condition]) -> Guard | None:
    """The conditions that can fail, each once; None where one never holds."""
    kept: dict[Condition, None] = {}
    for index, low, high in conditions:
        if index.most < low or index.least >= high:
            return None
        if index.least < low or index.most >= high:
            kept[expanded(index), low, high] = None
    return tuple(kept)


def _axes(detail: Any) -> frozenset[str]:
    if isinstance(detail, Index):
        return axes_of(detail)
    if isinstance(detail, Load):
        return axes_of(detail.address).union(*(axes_of(index) for index, _, _ in detail.guard))
    return frozenset()
