"""Index arithmetic: what simplification makes of an expression has the same value everywhere, within its bounds."""

from collections.abc import Sequence
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kimigraph.ir.pointwise.index import (
    Index,
    Quotient,
    Remainder,
    Variable,
    evaluated,
    expanded,
    flattened,
    of,
    unflattened,
    within,
)

X, R = Variable("row", 24), Variable("column", 10)
EVERYWHERE = [{"row": x, "column": r} for x, r in product(range(X.extent), range(R.extent))]

Numbers = list[int]


@st.composite
def expressions(draw: st.DrawFn) -> tuple[Index, Numbers]:
    """An index that operators built, and its values by plain arithmetic."""
    index, values = of(X) * 10 + of(R), [10 * at["row"] + at["column"] for at in EVERYWHERE]
    pool = [(index, values), (of(X), [at["row"] for at in EVERYWHERE]), (of(R), [at["column"] for at in EVERYWHERE])]
    for _ in range(draw(st.integers(1, 6))):
        index, values = draw(st.sampled_from(pool))
        number = draw(st.sampled_from([2, 3, 4, 5, 6, 8, 10, 12, 20, 40]))
        kind = draw(st.sampled_from(["quotient", "remainder", "times", "plus", "sum"]))
        if kind == "quotient":
            index, values = index // number, [value // number for value in values]
        elif kind == "remainder":
            index, values = index % number, [value % number for value in values]
        elif kind == "times":
            index, values = index * number, [value * number for value in values]
        elif kind == "plus":
            index, values = index + number, [value + number for value in values]
        else:
            other, more = draw(st.sampled_from(pool))
            index, values = index + other, [a + b for a, b in zip(values, more, strict=True)]
        pool.append((index, values))
    return pool[-1]


@settings(max_examples=300, deadline=None)
@given(built=expressions())
def test_simplified_expressions_keep_their_values(built: tuple[Index, Numbers]) -> None:
    index, values = built
    assert [evaluated(index, at) for at in EVERYWHERE] == values
    assert index.least <= min(values) and max(values) <= index.most


@pytest.mark.parametrize("shape", [(24, 10), (240,), (4, 60), (6, 4, 10), (2, 120), (8, 30), (5, 48), (1, 240, 1)])
def test_every_shape_is_found_again(shape: Sequence[int]) -> None:
    position = unflattened(of(X) * 10 + of(R), shape)
    assert flattened(position, shape) == of(X) * 10 + of(R)
    for at in EVERYWHERE:
        assert all(0 <= evaluated(index, at) < size for index, size in zip(position, shape, strict=True))


def test_whole_rows_need_no_division() -> None:
    rows = unflattened(of(X) * 10 + of(R), (24, 10))
    assert rows == (of(X), of(R))
    heads = unflattened(of(X) * 10 + of(R), (6, 40))
    assert not any(isinstance(atom, Quotient | Remainder) for atom in flattened(heads, (6, 40)).atoms())


def test_what_is_known_to_lie_inside_simplifies_by_its_bounds() -> None:
    """The second half of a row of 10, moved to the front: an address without division."""
    half = within(of(R), -5, 5)
    assert (half.least, half.most) == (0, 4)
    address = flattened((*unflattened(of(X) * 10 + (half + 5), (24, 10)),), (24, 10))
    assert expanded(address) == of(X) * 10 + of(R)
    assert within(of(R), 0, 10) == of(R) and within(of(R), -9, 1) == Index()
