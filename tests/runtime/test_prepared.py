"""Prepared weights: made when a program is bound, and again when the model's own change, however it is run."""

import json
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import kimigraph
from kimigraph.ir.config import CompileConfig
from kimigraph.ir.errors import UsageError
from kimigraph.ir.manifest import Manifest
from kimigraph.ir.preparation import prepare
from kimigraph.ir.reference.hadamard import hadamard_rotated
from kimigraph.run import run_artifact
from kimigraph.runtime.executor import Executor
from kimigraph.runtime.prepared import PreparedWeights, in_turn, prepare_in_place


class TwoProducts(nn.Module):
    """Two products of the same rows; the first weight is also read as it is."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(16, 8, bias=False)
        self.second = nn.Linear(16, 12, bias=False)
        self.tied = tied

    def forward(self, x: Tensor) -> Tensor:
        found = self.first(x).sigmoid().sum(-1, keepdim=True) * self.second(x).tanh()
        return found + self.first.weight.sum() if self.tied else found


@pytest.fixture
def optimized() -> Any:
    def run(model: nn.Module) -> Any:
        return kimigraph.optimize(model, (torch.ones(3, 16),), CompileConfig(target="cpu:reference", cache="off"))

    return run


@pytest.mark.parametrize("tied", [False, True])
def test_a_program_with_a_prepared_weight_computes_the_same(optimized: Any, tied: bool, tmp_path: Path) -> None:
    model, x = TwoProducts(tied), torch.randn(3, 16)
    compiled = optimized(model)
    torch.testing.assert_close(compiled(x), model(x))
    manifest = Manifest.read(Path(compiled.save(tmp_path / "artifact")))
    assert manifest.preparation == {
        "first+second.weight": [{"op": "cat", "dim": 0, "of": ["first.weight", "second.weight"]}]
    }
    gone = ["second.weight"] if tied else ["first.weight", "second.weight"]
    assert [spec.source for spec in manifest.sources] == gone
    assert sorted(spec.source for spec in manifest.bound) == ["first.weight", "second.weight"]
    loaded = kimigraph.load(tmp_path / "artifact", model.state_dict())
    torch.testing.assert_close(loaded(x), model(x))


def test_a_weight_that_changes_in_place_is_seen(optimized: Any) -> None:
    model, x = TwoProducts(), torch.randn(3, 16)
    compiled = optimized(model)
    before = compiled(x).clone()
    with torch.no_grad():
        model.second.weight.mul_(0.5)
    torch.testing.assert_close(compiled(x), model(x))
    assert not torch.equal(compiled(x), before)
    model.load_state_dict(TwoProducts().state_dict())
    torch.testing.assert_close(compiled(x), model(x))


def test_programs_of_other_shapes_share_what_is_made_of_the_weights(optimized: Any) -> None:
    model = TwoProducts()
    compiled = optimized(model)
    torch.testing.assert_close(compiled(torch.ones(5, 16)), model(torch.ones(5, 16)))
    values = {program.executor.bound["first+second.weight"].data_ptr() for program in compiled._programs.values()}
    assert len(compiled._programs) == 2 and len(values) == 1
    with torch.no_grad():
        model.first.weight.mul_(2)
    for rows in (3, 5):
        torch.testing.assert_close(compiled(torch.ones(rows, 16)), model(torch.ones(rows, 16)))


def test_the_self_test_prepares_from_the_models_own_weights(optimized: Any, tmp_path: Path) -> None:
    artifact = Path(optimized(TwoProducts()).save(tmp_path / "artifact"))
    assert json.loads((artifact / "manifest.json").read_text())["checksums"]
    assert "aten.cat" not in (artifact / "program.py").read_text()
    command = [sys.executable, str(artifact / "program.py"), "--check"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert run_artifact(artifact, None, None, 1)["passed"] is True

    weights = tmp_path / "weights"
    weights.mkdir()
    state = TwoProducts().state_dict()
    save_file(state, weights / "model.safetensors")
    given = subprocess.run([*command, "--weights", str(weights)], capture_output=True, text=True, check=False)
    assert given.returncode == 3  # other weights, other numbers
    assert given.stdout.split()[1:] == list(map(repr, run_artifact(artifact, weights, None, 1)["outputs"]["mul"]))
    save_file({"first.weight": state["first.weight"]}, weights / "model.safetensors")
    lacking = subprocess.run([*command, "--weights", str(weights)], capture_output=True, text=True, check=False)
    assert lacking.returncode == 1 and "lacks 1 weights of the program, second.weight" in lacking.stderr


def test_a_missing_weight_is_named_as_the_model_names_it(optimized: Any, tmp_path: Path) -> None:
    artifact = Path(optimized(TwoProducts()).save(tmp_path / "artifact"))
    with pytest.raises(UsageError, match=r"not given: second\.weight"):
        kimigraph.load(artifact, {"first.weight": torch.zeros(8, 16)})


def test_weights_that_are_given_up_leave_memory_one_by_one() -> None:
    tensors = {"a": torch.ones(2), "b": torch.zeros(3), "c": torch.full((1,), 2.0)}
    watched = {name: weakref.ref(tensor) for name, tensor in tensors.items()}
    alive: list[set[str]] = []

    class Watching(dict[str, torch.Tensor]):
        def __setitem__(self, name: str, value: torch.Tensor) -> None:
            super().__setitem__(name, value)
            alive.append({name for name, reference in watched.items() if reference() is not None})

    held = Watching(tensors)
    tensors.clear()
    cat = {"op": "cat", "dim": 0}
    prepare_in_place({"ab": [{**cat, "of": ["a", "b"]}], "ba": [{**cat, "of": ["b", "c"]}]}, held, {"a", "b"})
    assert alive == [{"a", "b", "c"}, {"b", "c"}]
    assert {name: tensor.tolist() for name, tensor in held.items()} == {
        "c": [2.0],
        "ab": [1.0, 1.0, 0.0, 0.0, 0.0],
        "ba": [0.0, 0.0, 0.0, 2.0],
    }
    assert watched["a"]() is None and watched["b"]() is None


def test_an_executor_that_is_given_the_weights_keeps_none_of_the_spare(optimized: Any, tmp_path: Path) -> None:
    model = TwoProducts()
    artifact = Path(optimized(model).save(tmp_path / "artifact"))
    tensors = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    watched = [weakref.ref(tensor) for tensor in tensors.values()]
    executor = Executor(artifact, tensors, give_up=True)
    assert not tensors and [reference() for reference in watched] == [None, None]
    (caller,) = executor.caller_inputs
    x = torch.ones(caller.shape)
    torch.testing.assert_close(executor(x)[0], model(x))


@pytest.mark.parametrize("tied", [False, True])
def test_programs_that_are_given_their_own_weights_have_each_once(optimized: Any, tied: bool, tmp_path: Path) -> None:
    model = TwoProducts(tied)
    artifact = Path(optimized(model).save(tmp_path / "artifact"))
    own = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    prepared = PreparedWeights(own)
    first, second = Executor(artifact, own, prepared), Executor(artifact, own, prepared)
    together = first.bound["first+second.weight"]
    assert second.bound["first+second.weight"] is together
    assert {tensor.untyped_storage().data_ptr() for tensor in own.values()} == {together.untyped_storage().data_ptr()}
    for name, tensor in own.items():
        assert torch.equal(tensor, model.state_dict()[name])
    held = {tensor.untyped_storage().data_ptr() for each in (first, second) for tensor in each.bound.values()}
    assert len(first.bound) == 1 + tied and held == {together.untyped_storage().data_ptr()}
    x = torch.ones(first.caller_inputs[0].shape)
    for executor in (first, second):
        torch.testing.assert_close(executor(x)[0], model(x))


def test_at_the_peak_there_are_the_weights_and_one_prepared() -> None:
    """Three pairs, of which one after the other is made one: what it is made of is gone before the next is."""
    own = {name: torch.full((4, 8), float(place)) for place, name in enumerate("abcdef")}
    watched = [weakref.ref(tensor) for tensor in own.values()]
    pairs = {first + second: [{"op": "cat", "dim": 0, "of": [first, second]}] for first, second in ("ab", "cd", "ef")}
    bound, prepared, alive = dict(own), PreparedWeights(own), list[int]()
    for name, steps, spent in in_turn(pairs, set(own)):
        bound[name] = prepared.weight(steps, bound).value
        for source in spent:
            del bound[source]
        alive.append(sum(reference() is not None for reference in watched))
    assert alive == [4, 2, 0] and sorted(bound) == ["ab", "cd", "ef"]
    assert [own[name].unique().tolist() for name in "abcdef"] == [[float(place)] for place in range(6)]


def test_a_step_of_another_version_is_refused() -> None:
    with pytest.raises(ValueError, match="no preparation that this version knows"):
        prepare([{"op": "quantize", "of": ["a"]}], {"a": torch.ones(1)})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_rotated_weight_is_what_the_operator_makes(dtype: torch.dtype) -> None:
    weight, x = torch.randn(24, 5).to(dtype), torch.randn(3, 5)
    made = prepare([{"op": "hadamard", "width": 8, "of": ["w"]}], {"w": weight})
    assert torch.equal(made, torch.ops.kimigraph.hadamard_rows(weight, width=8))
    if dtype is torch.float32:
        turned = hadamard_rotated((x @ weight.T).unflatten(-1, (3, 8))).flatten(-2)
        assert torch.allclose(x @ made.T, turned, atol=1e-5)
