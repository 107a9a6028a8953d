"""Layout algebra: views by their strides, frames by their axes, concatenations by their pieces."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Graph, Node

from kimigraph.ir.program import CapturedProgram
from kimigraph.passes.algebra.frames import Frame, Occurrence, operand, row_major
from kimigraph.passes.algebra.layout import Layout, layout, peel
from kimigraph.passes.algebra.nodes import constant, widens
from kimigraph.passes.algebra.pieces import pieces, require_cover
from kimigraph.passes.algebra.refusal import Refused

ATEN = torch.ops.aten
Trace = Callable[..., CapturedProgram]


def result(program: CapturedProgram) -> Node:
    return next(node for node in program.graph_module.graph.nodes if node.op == "output").args[0][0]


def named(graph: Graph, name: str) -> Node:
    return next(node for node in graph.nodes if node.name.startswith(name))


SPELLINGS: list[Callable[[Tensor], Tensor]] = [
    lambda x: x.view(2, 5, 3, 4).transpose(1, 2)[..., 1:3],
    lambda x: x.view(2, 5, 3, 4).permute(0, 2, 1, 3).narrow(-1, 1, 2),
    lambda x: x.unflatten(-1, (3, 4)).transpose(2, 1).split([1, 2, 1], dim=-1)[1],
    lambda x: x.view(2, 5, 3, 4).contiguous().transpose(1, 2).clone()[..., 1:3],
    lambda x: x.view(2, 5, 3, 4)[..., 1:3].transpose(1, 2),
]


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_one_layout_for_all_spellings(spelling: Callable[[Tensor], Tensor], trace: Trace) -> None:
    program = trace(lambda x: spelling(x.sin()), torch.randn(2, 5, 12))
    base, chain = peel(result(program))
    assert base.target is ATEN.sin.default
    assert layout(base, chain) == Layout((2, 3, 5, 2), (60, 4, 12, 1), 1)


def test_strides_of_single_elements_mean_nothing(trace: Trace) -> None:
    one = trace(lambda x: x.sin().view(1, 1, 8).transpose(0, 1), torch.randn(1, 8))
    other = trace(lambda x: x.sin().view(1, 1, 8), torch.randn(1, 8))
    assert layout(*peel(result(one))) == layout(*peel(result(other)))


def test_a_copy_in_between_that_reorders_has_no_layout(trace: Trace) -> None:
    program = trace(lambda x: x.sin().t().reshape(2, 6), torch.randn(3, 4))
    program_result = result(program)
    while program_result.target is not ATEN.sin.default and program_result.target is ATEN.clone.default:
        program_result = program_result.args[0]
    assert layout(*peel(result(program))) is None


def test_casts_are_walked_through_only_where_values_stay(trace: Trace) -> None:
    widened = trace(lambda x: x.sin().float(), torch.randn(4, dtype=torch.bfloat16))
    rounded = trace(lambda x: x.sin().bfloat16().float(), torch.randn(4))
    assert peel(result(widened))[0].target is ATEN.sin.default
    base, _ = peel(result(rounded))
    assert base.target is ATEN._to_copy.default and not widens(base)
    assert peel(result(rounded), casts="float")[0].target is ATEN.sin.default
    assert peel(result(widened), casts="none")[0] is result(widened)


def test_bool_and_float_never_widen_into_each_other(trace: Trace) -> None:
    program = trace(lambda x: (x > 0).float(), torch.randn(4))
    assert not widens(result(program)) and peel(result(program))[0] is result(program)


@pytest.mark.parametrize(
    ("make", "value"),
    [
        (lambda x: torch.zeros(3), 0),
        (lambda x: torch.ones(3, dtype=torch.bool).unsqueeze(0).expand(2, 3), True),
        (lambda x: torch.full((2,), -2.5).clone(), -2.5),
        (lambda x: torch.zeros_like(x), 0),
        (lambda x: x.sin(), None),
    ],
)
def test_constants_are_seen_through_views(make: Callable[[Tensor], Tensor], value: Any, trace: Trace) -> None:
    program = trace(lambda x: (make(x), x + 1), torch.randn(3))
    assert constant(result(program)) == value


def test_numbers_are_their_own_constants() -> None:
    assert constant(2) == 2 and constant("2") is None


# Operands ----------------------------------------------------------------------------------------------------------


def occurrence(node: Node, axes: str) -> Occurrence:
    base, chain = peel(node)
    return Occurrence(node, base, tuple(chain), Frame.of(axes))


def test_the_innermost_node_of_the_right_layout_is_taken(trace: Trace) -> None:
    """T = D: a shape alone would stop at the transposed key."""
    program = trace(lambda x: x.sin().transpose(1, 2).unsqueeze(1), torch.randn(2, 4, 4))
    leaf = occurrence(result(program), "bsdt")
    found = operand("keys", leaf, "btd", leaf.sizes())
    assert found.node.target is ATEN.sin.default


def test_a_cache_with_a_head_dim_is_viewed(trace: Trace) -> None:
    program = trace(lambda x: x.sin().expand(2, 3, 5, 4), torch.randn(2, 1, 5, 4))
    leaf = occurrence(result(program), "bhtr")
    found = operand("rope", leaf, "btr", leaf.sizes())
    assert found.node.target is ATEN.sin.default and found.shape == (2, 5, 4)


def test_a_wrong_order_is_refused_with_both_layouts(trace: Trace) -> None:
    program = trace(lambda x: x.sin(), torch.randn(2, 4, 4))
    with pytest.raises(Refused, match=r"keys is not \[b, t, d\].*wanted") as caught:
        operand("keys", occurrence(result(program), "bdt"), "btd", {"b": 2, "t": 4, "d": 4})
    assert caught.value.node is result(program)


def test_reductions_and_products_add_axes(trace: Trace) -> None:
    program = trace(lambda a, b: (a.unsqueeze(1) * b).sum(-1), torch.randn(2, 7), torch.randn(3, 7))
    total = result(program)
    reduced = Frame.of("ij").reduced(2, False, "k")
    assert reduced.axes == ("i", "j", "k")
    view = reduced.view(torch.empty(2, 3, 7, device="meta"))
    assert view.shape == (2, 3, 7) and view.stride() == (21, 7, 1)
    assert total.meta["val"].shape == (2, 3)
    left = Frame.of("ij").left((2, 3), "k").view(torch.empty(2, 7, device="meta"))
    right = Frame.of("ij").right((2, 3), "k").view(torch.empty(7, 3, device="meta"))
    assert left.stride() == (7, 0, 1) and right.stride() == (0, 1, 3)


def test_row_major_ignores_single_elements() -> None:
    assert row_major("btd", {"b": 1, "t": 3, "d": 4}) == {"b": 0, "t": 4, "d": 1}


# Pieces ------------------------------------------------------------------------------------------------------------


def widths(node: Node) -> list[tuple[int, int, str]]:
    return [(piece.start, piece.stop, piece.node.target.overloadpacket.__name__) for piece in pieces(node)]


def written(a: Tensor, b: Tensor, *, start: int = 2) -> Tensor:
    """Two slices written over an empty tensor, functionally, as export spells it."""
    whole = a.new_empty([4, 5])
    whole = torch.slice_scatter(whole, ATEN.copy.default(whole[:, :2], a.sin()), 1, 0, 2)
    return torch.slice_scatter(whole, ATEN.copy.default(whole[:, start:], b.cos()), 1, start, 9223372036854775807)


def test_cat_and_written_slices_are_the_same_pieces(trace: Trace) -> None:
    a, b = torch.randn(4, 2), torch.randn(4, 3)
    by_cat = result(trace(lambda a, b: torch.cat([a.sin(), b.cos()], -1), a, b))
    by_slices = result(trace(lambda a, b: written(a, b), a, b))
    assert widths(by_cat) == widths(by_slices) == [(0, 2, "sin"), (2, 5, "cos")]
    require_cover(pieces(by_cat), 5, by_cat)


def test_empty_pieces_are_dropped(trace: Trace) -> None:
    node = result(trace(lambda a, b: torch.cat([a.sin(), b.cos()], -1), torch.randn(4, 2), torch.randn(4, 0)))
    assert widths(node) == [(0, 2, "sin")]


def test_another_tensor_is_one_piece(trace: Trace) -> None:
    node = result(trace(lambda a: a.sin(), torch.randn(4, 2)))
    assert widths(node) == [(0, 2, "sin")]


def test_a_partly_overwritten_piece_is_refused(trace: Trace) -> None:
    node = result(trace(lambda a, b: written(a, b, start=1), torch.randn(4, 2), torch.randn(4, 4)))
    with pytest.raises(Refused, match="partly overwritten"):
        pieces(node)


def test_a_gap_is_refused(trace: Trace) -> None:
    node = result(trace(lambda a: torch.slice_scatter(a.new_empty([4, 5]), a.sin(), 1, 1, 3), torch.randn(4, 2)))
    with pytest.raises(Refused, match="do not make up 5 columns"):
        require_cover(pieces(node), 5, node)
