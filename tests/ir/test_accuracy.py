"""Errors between sets of tensors, and the data on which they are taken."""

import math

import torch

from kimigraph.ir.accuracy import deviation, tensor_error
from kimigraph.ir.data_sets import DataSet, data_sets, make_data, run_steps
from kimigraph.ir.program import InputSpec

INPUTS = (
    InputSpec("weight", "weight", "weight", (3, 4), (4, 1), "float32"),
    InputSpec("norm", "weight", "norm.weight", (4,), (1,), "float32"),
    InputSpec("lengths", "input", "lengths", (3,), (1,), "int32", value_range=(2, 9)),
    InputSpec("tokens", "input", "tokens", (3, 1), (1, 1), "int64", value_range=(0, 100)),
    InputSpec("state", "cache", "state.0", (3, 4), (4, 1), "float32", mutated=True),
)


def test_relative_error_is_over_the_largest_magnitude() -> None:
    assert tensor_error(torch.tensor([1.0, 2.5]), torch.tensor([1.0, 2.0])) == (0.5, 0.25)
    assert tensor_error(torch.tensor([math.inf, math.nan]), torch.tensor([math.inf, math.nan])) == (0.0, 0.0)
    assert tensor_error(torch.tensor([math.nan]), torch.tensor([1.0])) == (math.inf, math.inf)
    assert tensor_error(torch.zeros(2), torch.zeros(3)) == (math.inf, math.inf)


def test_the_worst_tensor_is_the_one_furthest_out_of_its_tolerance() -> None:
    want = {"a": torch.tensor([1.0]), "b": torch.tensor([1.0])}
    worst = deviation({"a": torch.tensor([1.002]), "b": torch.tensor([1.01])}, want, 1e-3, {"b": 0.1})
    assert worst.tensor == "a" and not worst.passed and abs(worst.absolute - 0.01) < 1e-6
    assert deviation(want, want).passed
    for lacking in ({"a": want["a"]}, {**want, "b": want["b"].double()}):
        assert deviation(lacking, want).tensor == "b" and not deviation(lacking, want).passed


def test_counters_are_set_and_matrices_scaled() -> None:
    sets = {data.name: make_data(data, INPUTS, {}) for data in data_sets(seed=3)}
    assert sets["empty"][2].tolist() == [2, 2, 2] and sets["full"][2].tolist() == [8, 8, 8]
    assert len(set(sets["mixed"][2].tolist())) > 1 and len(set(sets["full"][3].flatten().tolist())) > 1
    plain = make_data(DataSet("plain", seed=6), INPUTS, {})
    small = make_data(DataSet("small", seed=6, scale=0.125), INPUTS, {})
    assert [torch.equal(b, a * 0.125) for a, b in zip(plain, small, strict=True)] == [True, False, False, False, True]
    assert torch.equal(small[1], plain[1])


def test_the_second_step_finds_what_the_first_wrote_and_new_tokens() -> None:
    seen: list[torch.Tensor] = []

    def step(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        *_, tokens, state = tensors
        seen.append(tokens)
        state.add_(1)
        return (state * 2,)

    tensors = make_data(DataSet("mixed", 0), INPUTS, {})
    values = run_steps(step, DataSet("mixed", 0), INPUTS, tensors, ["out"])
    assert torch.equal(values["state.0 at step 2"], tensors[4] + 1 + 1)
    assert torch.equal(values["out at step 1"], (tensors[4] + 1) * 2)
    assert not torch.equal(seen[0], seen[1])
