"""Public models of transformers, compiled, against transformers' own eager outputs, caches and states.

The eager model runs in a process that knows nothing of this project, before the compiled one exists; weights are
exchanged as a checkpoint.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import kimigraph
from kimigraph.capture import load_source
from kimigraph.compiler import compile_source
from kimigraph.ir.config import CompileConfig

STEPS, BATCH, CONTEXT = 16, 2, 21
_COMMON: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 40,
    "intermediate_size": 56,
    "moe_intermediate_size": 24,
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
    "v_head_dim": 10,
    "max_position_embeddings": 64,
    "mlp_layer_types": ["dense", "sparse"],
    "index_topk": 5,
    "index_head_dim": 16,
    "index_n_heads": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_TEXT: dict[str, Any] = {
    **_COMMON,
    "model_type": "glm5_next_text",
    "qk_rope_head_dim": 0,
    "layer_types": ["linear_attention", "indexed_attention"],
    "indexer_types": ["full", "full"],
    "index_kpool": 4,
    "index_topk": 8,
    "linear_head_dim": 8,
    "linear_num_heads": 3,
    "hc_mult": 2,
    "hc_sinkhorn_iters": 2,
}
_VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 40}
CONFIGS: dict[str, dict[str, Any]] = {
    "deepseek_v32": {**_COMMON, "model_type": "deepseek_v32", "qk_rope_head_dim": 8},
    "glm5_next": {
        "model_type": "glm5_next",
        "text_config": _TEXT,
        "vision_config": {**_VISION, "projection_intermediate_size": 16},
    },
}
FUSIONS = {
    "deepseek_v32": {
        "raise-kda": 0,
        "raise-attention-residual": 0,
        "raise-cache-writes": 4,
        "raise-moe": 1,
        "fuse-lightning-indexer": 2,
        "fuse-sparse-attention": 2,
        "fuse-indexer-attention": 0,
        "merge-horizontal": 6,
    },
    "glm5_next": {
        "raise-kda": 1,
        "raise-attention-residual": 0,
        "raise-cache-writes": 1,
        "raise-moe": 1,
        "fuse-lightning-indexer": 1,
        "fuse-sparse-attention": 1,
        "fuse-indexer-attention": 0,
        "merge-horizontal": 6,
    },
}


@pytest.fixture(scope="session", params=list(CONFIGS))
def eager(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """Model type, and the checkpoint with the steps that transformers took."""
    directory = tmp_path_factory.mktemp(request.param) / "checkpoint"
    config = directory.with_name("config.json")
    config.write_text(json.dumps(CONFIGS[request.param]))
    script = Path(__file__).with_name("transformers_steps.py")
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "TRITON_INTERPRET")}
    command = [sys.executable, "-P", script, config, directory, STEPS, BATCH, CONTEXT]
    ran = subprocess.run(
        list(map(str, command)),
        env={**environment, "OMP_NUM_THREADS": "1"},
        cwd=directory.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return request.param, directory


def _weights(directory: Path, config: CompileConfig) -> dict[str, torch.Tensor]:
    state = load_source(str(directory), config).build()[0].state_dict()
    return {name.removeprefix("model."): tensor for name, tensor in state.items()}


@pytest.mark.parametrize("marks", [True, False])
def test_sixteen_steps_equal_the_eager_ones(eager: tuple[str, Path], tmp_path: Path, marks: bool) -> None:
    kind, directory = eager
    config = CompileConfig(target="cpu:reference", batch=BATCH, context=CONTEXT, marks=marks, cache="off")
    (report,) = compile_source(str(directory), [config], tmp_path / "artifact", print)
    found = {entry["rule"]: entry["count"] for entry in report.fusions}
    assert found.pop("fuse-pointwise") > 5 and found.pop("raise-norms") >= 3 and found == FUSIONS[kind]
    compiled = kimigraph.load(tmp_path / "artifact", _weights(directory, config))
    caches, steps = compiled.new_caches(), load_file(directory / "steps.safetensors")
    for step in range(STEPS):
        logits = compiled(steps[f"{step}.input_ids"], caches)
        wanted = steps[f"{step}.logits"]
        torch.testing.assert_close(logits, wanted, atol=1e-4 * wanted.abs().max().item(), rtol=0)
        named = {name: steps[f"{step}.{name}"] for name in caches}
        for name, want in named.items():
            assert caches[name].shape == want.shape
            limit = 1e-4 * max(want.abs().max().item(), 1e-3)
            torch.testing.assert_close(caches[name], want, atol=limit, rtol=0, msg=f"{name} at step {step}")
    assert {name for name in steps if name.startswith("0.c") or name.startswith("0.s")} == {f"0.{n}" for n in caches}
