"""Picks are compared as sets, up to near-ties, and injected in the form that a top-k has."""

import pytest
import torch

from kimigraph.capture import capture_module
from kimigraph.ir.config import CompileConfig
from kimigraph.ir.errors import NumericsError
from kimigraph.selections import SelectionInterpreter, Selections, check_selections, score_errors

NEG = float("-inf")
SCORES = torch.tensor([[4.0, 3.0, 2.0, 1.99999, 0.0, NEG]])


def picks(*entries: int) -> torch.Tensor:
    return torch.tensor([entries])


def own() -> Selections:
    return Selections({"topk": picks(0, 1, 2)}, {"topk": SCORES})


@pytest.mark.parametrize(
    ("given", "differing"), [((2, 0, 1), 0), ((0, 1, 3), 2), ((0, 1, 2, -1), 0)], ids=["order", "near-tie", "padding"]
)
def test_equal_sets_and_near_ties_pass(given: tuple[int, ...], differing: int) -> None:
    assert check_selections(own(), {"topk": picks(*given)}, 1e-4) == differing


@pytest.mark.parametrize(
    ("given", "entry"), [((0, 1, 4), 4), ((0, 2, 3), 1), ((0, 1, -1), 2)], ids=["beyond", "missing the best", "too few"]
)
def test_a_pick_beyond_the_tolerance_is_reported_with_row_and_scores(given: tuple[int, ...], entry: int) -> None:
    selections = own()
    with pytest.raises(NumericsError, match=f"topk: row 0 picks other entries .*entry {entry} scores .*the cut is 2"):
        check_selections(selections, {"topk": picks(*given)}, 1e-4)


def test_masked_entries_do_not_count() -> None:
    selections = Selections({"topk": picks(0, 4, 5)}, {"topk": torch.tensor([[1.0, NEG, NEG, NEG, NEG, NEG]])})
    assert check_selections(selections, {"topk": picks(0, -1, -1)}, 1e-4) == 0
    with pytest.raises(NumericsError):
        check_selections(selections, {"topk": picks(-1, -1, -1)}, 1e-4)


class Pick(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values, indices = torch.topk(x, 3, dim=-1)
        return values, indices


@pytest.mark.parametrize(
    ("given", "filled"),
    [((1, 3, 4), [1, 3, 4]), ((0, -1, -1), [0, 1, 2]), ((4, -1, -1), [4, 0, 1]), ((2, 0, 1), [2, 0, 1])],
)
def test_given_picks_replace_those_of_the_graph(given: tuple[int, ...], filled: list[int]) -> None:
    """Where the program lists fewer than k, the top-k's own entries follow, each once."""
    program = capture_module(Pick(), (SCORES,), {}, CompileConfig())
    (node,) = [node.name for node in program.graph_module.graph.nodes if node.target == torch.ops.aten.topk.default]
    interpreter = SelectionInterpreter(program, {node: picks(*given)})
    values, indices = interpreter.run(SCORES)
    assert indices.tolist() == [filled]
    assert torch.equal(values, SCORES[:, filled])
    assert interpreter.selections.picked[node].tolist() == [[0, 1, 2]]


def test_pools_that_no_key_has_filled_have_nothing_to_compare() -> None:
    nothing = Selections({"topk": torch.empty(2, 1, 0, dtype=torch.int64)}, {"topk": torch.empty(2, 1, 0)})
    assert check_selections(nothing, {"topk": torch.full((2, 1, 8), -1)}, 1e-4) == 0


class PickAll(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values, indices = torch.topk(x, x.shape[-1], dim=-1)
        return values + 1, indices


def test_given_picks_of_nothing_are_nothing() -> None:
    program = capture_module(PickAll(), (torch.empty(2, 0),), {}, CompileConfig())
    (node,) = [node.name for node in program.graph_module.graph.nodes if node.target == torch.ops.aten.topk.default]
    values, indices = SelectionInterpreter(program, {node: torch.full((2, 4), -1)}).run(torch.empty(2, 0))
    assert values.shape == indices.shape == (2, 0)


def test_what_sixteen_bits_may_move_is_measured_row_by_row() -> None:
    """In the first row rounding moved a score by 0.2, in the second by nothing: only there the swap is an error."""
    scores = torch.tensor([[3.0, 2.0, 1.9, -3e38], [3.0, 2.0, 1.9, 0.0]])
    moved = scores.clone()
    moved[0, 2] = 2.1
    wide = Selections({"topk": torch.tensor([[0, 1], [0, 1]])}, {"topk": scores})
    narrow = Selections({"topk": torch.tensor([[0, 2], [0, 1]])}, {"topk": moved})
    slack = score_errors(narrow, wide)
    torch.testing.assert_close(slack["topk"], torch.tensor([0.2, 0.0]))
    assert check_selections(wide, {"topk": torch.tensor([[0, 2], [0, 1]])}, 1e-4, slack) == 2
    with pytest.raises(NumericsError, match="row 1 picks other entries"):
        check_selections(wide, {"topk": torch.tensor([[0, 1], [0, 2]])}, 1e-4, slack)
    with pytest.raises(NumericsError, match="row 0"):
        check_selections(wide, {"topk": torch.tensor([[1, 2], [0, 1]])}, 1e-4, slack)
