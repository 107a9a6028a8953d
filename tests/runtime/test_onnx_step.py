"""Target ``cpu:onnxruntime``: artifacts of kind ``onnx`` bound, run, saved, loaded and refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kimigraph
from kimigraph.ir.errors import CompileError, CorruptArtifactError, UsageError
from kimigraph.ir.manifest import Manifest

CONFIG = kimigraph.CompileConfig(target="cpu:onnxruntime", cache="off")


class Step(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(64, 64)
        self.register_buffer("steps", torch.zeros(1))

    def forward(self, x: Tensor, cache: dict[str, Tensor]) -> dict[str, Any]:
        cache["last"].copy_(torch.tanh(self.project(x)))
        self.steps.add_(1)
        return {"out": cache["last"] * 2 + self.steps, "width": 64}


@pytest.fixture
def model() -> Step:
    torch.manual_seed(0)
    return Step().eval().requires_grad_(False)


def inputs() -> tuple[Tensor, dict[str, Tensor]]:
    return torch.ones(2, 64), {"last": torch.zeros(2, 64)}


def expected(model: Step, steps: float) -> Tensor:
    return torch.tanh(model.project(torch.ones(2, 64))) * 2 + steps


def test_steps_give_the_values_of_eager_and_update_states_in_place(model: Step) -> None:
    compiled = kimigraph.optimize(model, inputs(), CONFIG)
    x, cache = inputs()
    for number in (1.0, 2.0, 3.0):
        result = compiled(x, cache)
        torch.testing.assert_close(result["out"], expected(model, number))
        torch.testing.assert_close(cache["last"] * 2 + number, result["out"])
        assert result["width"] == 64 and model.steps.tolist() == [number]
    assert compiled.report().target == "cpu:onnxruntime"


def test_a_weight_that_is_written_is_seen(model: Step) -> None:
    compiled = kimigraph.optimize(model, inputs(), CONFIG)
    compiled(*inputs())
    model.project.weight.mul_(-0.5)
    torch.testing.assert_close(compiled(*inputs())["out"], expected(model, 2.0))


def test_an_artifact_holds_no_weights_and_runs_with_those_that_are_given(model: Step, tmp_path: Path) -> None:
    kimigraph.optimize(model, inputs(), CONFIG).save(tmp_path / "artifact")
    manifest = Manifest.read(tmp_path / "artifact")
    assert (manifest.kind, manifest.target) == ("onnx", "cpu:onnxruntime")
    assert (tmp_path / "artifact" / "model.onnx").stat().st_size < model.project.weight.nbytes
    model.steps.zero_()
    loaded = kimigraph.load(tmp_path / "artifact", model.state_dict())
    torch.testing.assert_close(loaded(*inputs())["out"], expected(model, 1.0))
    with (tmp_path / "artifact" / "model.onnx").open("ab") as file:
        file.write(b"x")
    with pytest.raises(CorruptArtifactError, match=r"model\.onnx"):
        kimigraph.load(tmp_path / "artifact", model.state_dict())


def test_semantic_operators_are_listed_as_functions_of_the_model() -> None:
    class Norm(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)

    compiled = kimigraph.optimize(Norm(), (torch.randn(2, 64),), CONFIG)
    (kernel,) = compiled.report().kernels
    assert (kernel["op"], kernel["file"]) == ("rms_norm", "model.onnx")
    x = torch.randn(2, 64)
    torch.testing.assert_close(compiled(x), Norm()(x))


def test_it_is_a_target_of_torch_compile(model: Step) -> None:
    torch._dynamo.reset()
    step = torch.compile(model, backend="kimigraph", options={"target": "cpu:onnxruntime"})
    torch.testing.assert_close(step(*inputs())["out"], expected(model, 1.0))


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"policy": "article"}, "insert-quantization"), ({"cache_layout": "paged"}, "as the model has them")],
)
def test_what_it_cannot_have_is_refused(model: Step, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        kimigraph.optimize(model, inputs(), kimigraph.CompileConfig(target="cpu:onnxruntime", cache="off", **settings))


def test_any_pipeline_may_be_asked_for(model: Step) -> None:
    config = kimigraph.CompileConfig(target="cpu:onnxruntime", cache="off", passes="canonicalize,fuse-pointwise")
    torch.testing.assert_close(kimigraph.optimize(model, inputs(), config)(*inputs())["out"], expected(model, 1.0))


def test_models_in_16_bits_are_refused(model: Step) -> None:
    x, cache = inputs()
    with pytest.raises(CompileError, match="float32, or for cpu:reference"):
        kimigraph.optimize(model.bfloat16(), (x.bfloat16(), {"last": cache["last"].bfloat16()}), CONFIG)
