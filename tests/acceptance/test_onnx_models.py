"""Public models and K3.1, tiny, as ONNX: sixteen steps in onnxruntime beside the eager model, states included."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kimigraph.adapters.onnx_model import OnnxSession
from kimigraph.capture import load_source
from kimigraph.capture.signature import call_leaves
from kimigraph.ir.config import CompileConfig
from kimigraph.onnx_export import export_onnx

ROOT = Path(__file__).parents[2]
STEPS, CONTEXT = 16, 24
COMMON: dict[str, Any] = {
    "random_weights": {"seed": 0},
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "n_shared_experts": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "kv_lora_rank": 24,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "max_position_embeddings": 64,
    "mlp_layer_types": ["dense", "sparse"],
    "index_topk": 8,
    "index_head_dim": 16,
    "index_n_heads": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
HYBRID = {"linear_head_dim": 8, "linear_num_heads": 3}
K31 = json.loads((ROOT / "examples" / "k31_tiny" / "config.json").read_text()) | {"num_hidden_layers": 4}
MODELS: dict[str, dict[str, Any]] = {
    "kimi_k31": K31,
    "kimi_k3": {key: value for key, value in K31.items() if not key.startswith("index_")},
    "deepseek_v32": COMMON,
    "glm_moe_dsa": COMMON,
    "kimi_linear": {**COMMON, **HYBRID, "num_experts": 4, "layer_types": ["linear_attention", "full_attention"]},
    "glm5_next": {
        **COMMON,
        "text_config": {
            **COMMON,
            **HYBRID,
            "model_type": "glm5_next_text",
            "qk_rope_head_dim": 0,
            "layer_types": ["linear_attention", "indexed_attention"],
            "indexer_types": ["full", "full"],
            "index_kpool": 4,
            "hc_mult": 2,
            "hc_sinkhorn_iters": 2,
        },
    },
}
FUNCTIONS = {
    "kimi_k31": {"KdaDecode", "LightningIndexer", "SparseAttention", "MoeExperts", "AttentionResidual", "RmsNorm"},
    "deepseek_v32": {"LightningIndexer", "SparseAttention", "MoeExperts", "RmsNorm"},
    "glm5_next": {"KdaDecode", "LightningIndexer", "SparseAttention", "MoeExperts", "RmsNorm"},
}
slow = pytest.mark.slow


def write_config(directory: Path, model_type: str) -> str:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({**MODELS[model_type], "model_type": model_type}))
    return str(directory)


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
