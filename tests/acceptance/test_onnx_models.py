"""Public models and K3.1, tiny, as ONNX: sixteen steps in onnxruntime beside the eager model, states included."""

from pathlib import Path

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


def error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).abs().max() / want.double().abs().max().clamp_min(1e-6))


@pytest.mark.parametrize(
    "model_type",
    [
        "kimi_k31",
        pytest.param("deepseek_v32", marks=slow),
        pytest.param("glm5_next", marks=slow),
        pytest.param("glm_moe_dsa", marks=slow),
        pytest.param("kimi_linear", marks=slow),
        pytest.param("kimi_k3", marks=slow),
    ],
)
def test_sixteen_decode_steps_from_empty_caches_equal_the_model(model_type: str, tmp_path: Path) -> None:
    directory = write_config(tmp_path / "model", model_type)
    config = CompileConfig(batch=2, context=CONTEXT, dtype="float32")
    report = export_onnx(directory, config, tmp_path / "step.onnx", lambda _: None)
    assert report.verify["passed"] and report.verify["max_rel_err"] <= 1e-4
    wanted = FUNCTIONS.get(model_type, set())
    assert wanted <= {name.partition("_")[0] for name in report.functions}
    session = OnnxSession(tmp_path / "step.onnx", 1)
    module, args, kwargs = load_source(directory, config).build(length=0)
    named = {leaf.name: leaf.value for leaf in call_leaves(module, args, kwargs)}
    states = {name: named[name].zero_().clone() for name in report.states}
    for name, value in named.items():
        assert value.dtype.is_floating_point or name == "input_ids" or not value.any()
    generator = torch.Generator().manual_seed(1)
    for step in range(STEPS):
        named["input_ids"].copy_(torch.randint(3, 96, named["input_ids"].shape, generator=generator))
        got = session.run({**{name: named[name] for name in report.inputs}, **states})
        with torch.no_grad():
            result = module(*args, **kwargs)
        want = result if isinstance(result, Tensor) else result[0]
        assert error(got["logits"], want) <= 1e-4, step
        for name, output in report.states.items():
            assert error(got[output], named[name]) <= 1e-4, (step, name)
            states[name] = got[output]
        if "lengths" in named:
            named["lengths"] += 1


@slow
@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize(
    "model_type", ["kimi_k31", pytest.param("deepseek_v32", marks=slow), pytest.param("glm5_next", marks=slow)]
)
def test_a_prompt_equals_the_model(model_type: str, flat: bool, tmp_path: Path) -> None:
    directory = write_config(tmp_path / "model", model_type)
    config = CompileConfig(phase="prefill", batch=2, context=CONTEXT, dtype="float32")
    report = export_onnx(directory, config, tmp_path / "prompt.onnx", lambda _: None, flat=flat)
    assert report.verify["passed"] and report.verify["outputs"] == 1 + len(report.states)
    assert bool(report.functions) != flat
