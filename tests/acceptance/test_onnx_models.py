"""Public models and K3.1, tiny, as ONNX: sixteen steps in onnxruntime beside the eager model, states included."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_configs import write_config
from torch import Tensor

from kimigraph.adapters.onnx_model import OnnxSession
from kimigraph.capture import load_source
from kimigraph.capture.signature import call_leaves
from kimigraph.ir.config import CompileConfig
from kimigraph.onnx_export import export_onnx

STEPS, CONTEXT = 16, 24
FUNCTIONS = {
    "kimi_k31": {"KdaDecode", "LightningIndexer", "SparseAttention", "MoeExperts", "AttentionResidual", "RmsNorm"},
    "deepseek_v32": {"LightningIndexer", "SparseAttention", "MoeExperts", "RmsNorm"},
    "glm5_next": {"KdaDecode", "LightningIndexer", "SparseAttention", "MoeExperts", "RmsNorm"},
}
slow = pytest.mark.slow


PROMPT = 8
ALL = ("kimi_k31", "kimi_k3", "deepseek_v32", "glm_moe_dsa", "kimi_linear", "glm5_next")


def error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).abs().max() / want.double().abs().max().clamp_min(1e-6))


class Exported:
    """One phase of a model as a file in onnxruntime, and the eager model beside it."""

    def __init__(self, directory: str, path: Path, config: CompileConfig, **options: Any) -> None:
        self.report = export_onnx(directory, config, path, lambda _: None, **options)
        assert self.report.verify["passed"] and self.report.verify["max_rel_err"] <= 1e-4
        self.session = OnnxSession(path, 1)
        self.module, self.args, self.kwargs = load_source(directory, config).build(length=0)
        self.named = {leaf.name: leaf.value for leaf in call_leaves(self.module, self.args, self.kwargs)}
        for name, value in self.named.items():
            assert value.dtype.is_floating_point or name == "input_ids" or not value.any()

    def step(self, ids: Tensor, states: dict[str, Tensor]) -> dict[str, Tensor]:
        """Both take the same tokens; the states after it, the file's, within 1e-4 of the model's like its logits."""
        self.named["input_ids"].copy_(ids)
        got = self.session.run({**{name: self.named[name] for name in self.report.inputs}, **states})
        with torch.no_grad():
            result = self.module(*self.args, **self.kwargs)
        assert error(got["logits"], result if isinstance(result, Tensor) else result[0]) <= 1e-4
        for name, output in self.report.states.items():
            assert error(got[output], self.named[name]) <= 1e-4, name
        if "lengths" in self.named:
            self.named["lengths"] += ids.shape[1]
        return {name: got[output] for name, output in self.report.states.items()}


@pytest.mark.parametrize(
    ("model_type", "level"),
    [
        ("kimi_k31", 2),
        *(pytest.param(model_type, 2, marks=slow) for model_type in ALL if model_type != "kimi_k31"),
        pytest.param("glm5_next", 0, marks=slow),  # how many pools its mask picks changes from step to step
    ],
)
def test_sixteen_decode_steps_from_empty_caches_equal_the_model(model_type: str, level: int, tmp_path: Path) -> None:
    directory = write_config(tmp_path / "model", model_type)
    config = CompileConfig(batch=2, context=CONTEXT, dtype="float32", opt_level=level)
    exported = Exported(directory, tmp_path / "step.onnx", config)
    wanted = FUNCTIONS.get(model_type, set()) if level else set[str]()
    assert wanted <= {name.partition("_")[0] for name in exported.report.functions}
    states = {name: exported.named[name].zero_().clone() for name in exported.report.states}
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        states = exported.step(torch.randint(3, 96, (2, 1), generator=generator), states)


@slow
@pytest.mark.parametrize("model_type", ALL)
def test_a_prompt_and_sixteen_steps_after_it_equal_the_model(model_type: str, tmp_path: Path) -> None:
    directory = write_config(tmp_path / "model", model_type)
    common: dict[str, Any] = {"batch": 2, "context": CONTEXT, "dtype": "float32"}
    prompt = Exported(directory, tmp_path / "prompt.onnx", CompileConfig(phase="prefill", tokens=PROMPT, **common))
    step = Exported(directory, tmp_path / "step.onnx", CompileConfig(**common))
    assert prompt.report.states.keys() == step.report.states.keys()
    generator = torch.Generator().manual_seed(1)
    states = {name: prompt.named[name].zero_().clone() for name in prompt.report.states}
    states = prompt.step(torch.randint(3, 96, (2, PROMPT), generator=generator), states)
    for name in [*states, *(name for name in ("lengths",) if name in step.named)]:
        step.named[name].copy_(prompt.named[name])
    for _ in range(STEPS):
        states = step.step(torch.randint(3, 96, (2, 1), generator=generator), states)


@slow
@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("model_type", ["kimi_k31", "deepseek_v32", "glm5_next"])
def test_a_prompt_equals_the_model(model_type: str, flat: bool, tmp_path: Path) -> None:
    directory = write_config(tmp_path / "model", model_type)
    config = CompileConfig(phase="prefill", batch=2, context=CONTEXT, dtype="float32")
    report = export_onnx(directory, config, tmp_path / "prompt.onnx", lambda _: None, flat=flat)
    assert report.verify["passed"] and report.verify["outputs"] == 1 + len(report.states)
    assert bool(report.functions) != flat
