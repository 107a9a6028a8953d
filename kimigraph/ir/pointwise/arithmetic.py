"""Arithmetic on the values of a region, in fp32 for all floating types and in their own for integers."""

from collections.abc import Callable
from math import sqrt

import torch

from kimigraph.ir.pointwise.values import Value, Values

Number = float | int | bool


def held(dtype: torch.dtype) -> torch.dtype:
    """The type in which values of ``dtype`` are computed: fp32 for floating types, else itself."""
    return torch.float32 if dtype.is_floating_point else dtype


class Arithmetic:
    """Operations that need no graph node; operands are of one held type, numbers take that of the other operand."""

    def __init__(self, values: Values) -> None:
        self.values = values

    def number(self, value: Number, like: Value) -> Value:
        """A constant of the type in which ``like`` is held."""
        return self.values.constant(value, held(like.dtype))

    def _pair(self, a: Value | Number, b: Value | Number) -> tuple[Value, Value]:
        if isinstance(a, Value):
            return a, b if isinstance(b, Value) else self.number(b, a)
        assert isinstance(b, Value)
        return self.number(a, b), b

    def _binary(self, op: str, a: Value | Number, b: Value | Number) -> Value:
        left, right = self._pair(a, b)
        return self.values.make(op, (left, right), held(left.dtype))

    def _compare(self, op: str, a: Value | Number, b: Value | Number) -> Value:
        return self.values.make(op, self._pair(a, b), torch.bool)

    def add(self, a: Value | Number, b: Value | Number) -> Value:
        """``a + b``."""
        return self._binary("add", a, b)

    def sub(self, a: Value | Number, b: Value | Number) -> Value:
        """``a - b``."""
        return self._binary("sub", a, b)

    def mul(self, a: Value | Number, b: Value | Number) -> Value:
        """``a * b``; a factor of 1 is left out."""
        if not isinstance(b, Value) and b == 1 and isinstance(a, Value):
            return a
        return self._binary("mul", a, b)

    def div(self, a: Value | Number, b: Value | Number) -> Value:
        """``a / b``, rounded as IEEE wants it; by a number a product with its inverse, as eager does it on a GPU."""
        if isinstance(a, Value) and not isinstance(b, Value) and b != 0:
            return self.mul(a, 1.0 / b)
        return self._binary("div", a, b)

    def ratio(self, a: Value | Number, b: Value | Number) -> Value:
        """``a / b`` to two units in the last place, for quotients inside a function that is no more exact itself."""
        return self._binary("ratio", a, b)

    def remainder(self, a: Value, by: int) -> Value:
        """What is left of an integer divided by a positive one, never negative."""
        if by & (by - 1) == 0:
            return self._binary("and", a, by - 1)
        rest = self._binary("rest", a, by)
        return self.where(self.lt(rest, 0), self.add(rest, by), rest)

    def floor_div(self, a: Value, by: int) -> Value:
        """The quotient of an integer and a positive one, rounded down."""
        quotient = self._binary("quotient", a, by)  # rounded to 0
        return self.where(self.lt(self._binary("rest", a, by), 0), self.sub(quotient, 1), quotient)

    def neg(self, a: Value) -> Value:
        """``-a``."""
        return self.unary("neg", a)

    def unary(self, op: str, a: Value) -> Value:
        """An operation of one operand, by name."""
        return self.values.make(op, (a,), held(a.dtype))

    def lt(self, a: Value | Number, b: Value | Number) -> Value:
        """``a < b``."""
        return self._compare("lt", a, b)

    def gt(self, a: Value | Number, b: Value | Number) -> Value:
        """``a > b``."""
        return self._compare("gt", a, b)

    def ne(self, a: Value | Number, b: Value | Number) -> Value:
        """``a != b``."""
        return self._compare("ne", a, b)

    def compare(self, op: str, a: Value | Number, b: Value | Number) -> Value:
        """A comparison by name."""
        return self._compare(op, a, b)

    def either(self, a: Value, b: Value) -> Value:
        """``a or b`` of truth values."""
        return self.values.make("or", (a, b), torch.bool)

    def where(self, condition: Value, a: Value | Number, b: Value | Number) -> Value:
        """``a`` where the condition holds, else ``b``."""
        left, right = self._pair(a, b)
        # What is chosen between two rounded values is rounded too.
        dtype = left.dtype if left.dtype is right.dtype else held(left.dtype)
        return self.values.make("where", (condition, left, right), dtype)

    def maximum(self, a: Value | Number, b: Value | Number) -> Value:
        """The larger one; not a number where either is none."""
        return self._extreme("gt", a, b)

    def minimum(self, a: Value | Number, b: Value | Number) -> Value:
        """The smaller one; not a number where either is none."""
        return self._extreme("lt", a, b)

    def _extreme(self, op: str, a: Value | Number, b: Value | Number) -> Value:
        left, right = self._pair(a, b)
        first = self._compare(op, left, right)
        if left.dtype.is_floating_point:
            first = self.either(first, self.ne(left, left))
        return self.where(first, left, right)

    def sigmoid(self, x: Value) -> Value:
        """``1 / (1 + exp(-x))``."""
        return self.ratio(1.0, self._one_plus_exp_of_minus(x))

    def silu(self, x: Value) -> Value:
        """``x / (1 + exp(-x))``."""
        return self.ratio(x, self._one_plus_exp_of_minus(x))

    def _one_plus_exp_of_minus(self, x: Value) -> Value:
        return self.add(self.unary("exp", self.neg(x)), 1.0)

    def softplus(self, x: Value, beta: float, threshold: float) -> Value:
        """``log1p(exp(beta x)) / beta``; x itself where beta x is above the threshold."""
        scaled = self.mul(x, beta)
        smooth = self.div(self.unary("log1p", self.unary("exp", scaled)), beta)
        return self.where(self.gt(scaled, threshold), x, smooth)

    def gelu(self, x: Value, approximate: str) -> Value:
        """``x`` times the normal distribution's integral, or its approximation by tanh."""
        if approximate == "tanh":
            cubed = self.mul(self.mul(x, x), x)
            inner = self.mul(self.add(x, self.mul(cubed, 0.044715)), sqrt(2 / torch.pi))
            inside = self.unary("tanh", inner)
        else:
            inside = self.unary("erf", self.mul(x, sqrt(0.5)))
        return self.mul(self.mul(x, 0.5), self.add(inside, 1.0))

    def power(self, x: Value, exponent: float) -> Value | None:
        """``x ** exponent`` for the exponents that are a few products or a root; None for another."""
        known: dict[float, Callable[[], Value]] = {
            1: lambda: x,
            2: lambda: self.mul(x, x),
            3: lambda: self.mul(self.mul(x, x), x),
            4: lambda: self.mul(self.mul(x, x), self.mul(x, x)),
            0.5: lambda: self.unary("sqrt", x),
            -0.5: lambda: self.unary("rsqrt", x),
            -1: lambda: self.div(1.0, x),
        }
        return known[exponent]() if exponent in known else None
