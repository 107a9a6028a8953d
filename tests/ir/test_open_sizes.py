"""Sizes that the run alone knows: they are equal as expressions, and what needs their number says so."""

from operator import add, mul
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from kimigraph.ir.open_sizes import OpenSize, OpenSizeError, SizeExpressions, larger, met, sized, smaller


@pytest.fixture
def picked() -> torch.Tensor:
    """[2, u, 4]: the rows of six that a mask picks."""
    with FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True):
        keep = torch.empty(6, dtype=torch.bool)
        return torch.ops.aten.index.Tensor(torch.empty(2, 6, 4), [None, keep])


def test_numbers_stay_numbers_and_others_are_compared_as_expressions(picked: torch.Tensor) -> None:
    two, size, four = map(sized, picked.shape)
    assert (two, four) == (2, 4) and isinstance(size, OpenSize) and sized(size) is size
    assert size == sized(picked.shape[1]) and size not in (0, 1, 6) and hash(size) == hash(sized(picked.shape[1]))
    assert size * 4 // 2 == 2 * size and size + 3 - size == 3 and 11 - (size + 3) == 8 - size
    assert repr(smaller(2, size) * 4) == "4*Min(2, u0)" and larger(3, 2) == 3 and smaller(2, 1) == 1


def test_a_comparison_is_answered_where_every_number_gives_the_same(picked: torch.Tensor) -> None:
    size = sized(picked.shape[1])
    assert size >= 0 and size <= 6 and size < 7 and not size > 6
    for needs_it in (lambda: size < 3, lambda: int(size), lambda: bool(size), lambda: list(range(size))):
        with pytest.raises(OpenSizeError, match="the size u0"):
            needs_it()


def test_shapes_meet_where_they_are_one_or_the_same(picked: torch.Tensor) -> None:
    size = sized(picked.shape[1])
    assert met([(2, 1, 1), (1, size), (size,)]) == (2, 1, size)
    assert met([(size, 3), (3,)]) == (size, 3)
    assert met([(size,), (4,)]) is None and met([(size,), (size * 2,)]) is None and met([(2,), (3,)]) is None


def test_an_expression_is_computed_once_of_the_preferred_tensor(picked: torch.Tensor) -> None:
    made: list[str] = []

    def pair(target: Any, a: Any, b: Any) -> str:
        names = {add: "+", mul: "*", torch.sym_min: "min"}
        made.append(f"({a} {names[target]} {b})")
        return made[-1]

    sizes = SizeExpressions(lambda source, axis: f"{source}.{axis}", pair)
    sizes.note("places", picked)
    sizes.note("rows", picked, preferred=True)
    sizes.note("later", picked, preferred=True)
    size = sized(picked.shape[1])
    assert sizes.of(size) == "rows.1"
    assert sizes.of(smaller(2, size) * 4 + 3) == "(((2 min rows.1) * 4) + 3)"
    before = len(made)
    sizes.of(smaller(2, size) * 4)
    assert len(made) == before
