"""``canonicalize`` on captures of public models: nothing provable is left, and not a bit of any result changes."""

import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kimigraph.capture import capture, load_source
from kimigraph.ir.config import CompileConfig
from kimigraph.ir.program import CapturedProgram
from kimigraph.ir.script import seeded_input
from kimigraph.passes import PassContext, PassRecord, Pipeline, run_pipeline

COMMON: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 40,
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
    "v_head_dim": 10,
    "max_position_embeddings": 128,
    "mlp_layer_types": ["dense", "sparse"],
    "index_topk": 8,
    "index_head_dim": 16,
    "index_n_heads": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "random_weights": {"seed": 0},
}
GLM = {
    **COMMON,
    "model_type": "glm5_next_text",
    "qk_rope_head_dim": 0,
    "layer_types": ["linear_attention", "indexed_attention"],
    "indexer_types": ["full", "full"],
    "index_kpool": 4,
    "linear_head_dim": 8,
    "linear_num_heads": 3,
    "hc_mult": 2,
    "hc_sinkhorn_iters": 2,
}
MODELS = {"deepseek_v32": {**COMMON, "model_type": "deepseek_v32", "qk_rope_head_dim": 8}, "glm5_next": GLM}
PACKED = 2 * COMMON["index_head_dim"] + 1
"""Width of glm5_next's index cache: key, gate, and a channel that says whether the entry is real."""
CONFIG = CompileConfig(batch=2, context=32)


@pytest.fixture(scope="module", params=list(MODELS))
def captured(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> CapturedProgram:
    directory = tmp_path_factory.mktemp(request.param)
    (directory / "config.json").write_text(json.dumps(MODELS[request.param]))
    return capture(load_source(str(directory), CONFIG), CONFIG)


@pytest.fixture
def cleaned(captured: CapturedProgram, context: PassContext) -> tuple[CapturedProgram, PassRecord]:
    program = captured.copy()
    return program, run_pipeline(program, Pipeline.parse("canonicalize"), context)[0]


def tensors(program: CapturedProgram, seed: int, length: int) -> list[torch.Tensor]:
    """Seeded tensors of all inputs, with ``length`` tokens in every cache and their keys marked as real."""
    made: list[torch.Tensor] = []
    for spec in program.inputs:
        value = program.tensors[spec.name] if spec.bound else seeded_input(spec, seed)
        if spec.kind == "cache" and "length" in spec.source:
            value = torch.full_like(value, length)
        if spec.source.endswith("index_key") and value.shape[-1] == PACKED:
            value[..., -1] = (torch.arange(value.shape[-2]) < length).to(value.dtype)
        made.append(value)
    return made


def test_asserts_sizes_and_dead_nodes_are_gone(cleaned: tuple[CapturedProgram, PassRecord]) -> None:
    program, record = cleaned
    graph = program.graph_module.graph
    counts = Counter(str(node.target) for node in graph.nodes)
    assert [target for target in counts if "_assert" in target or "sym_" in target] == []
    assert record.nodes_before - record.nodes_after >= 50
    assert record.result.statistics["asserts-dropped"] >= 35
    assert not any(type(size) is not int for node in graph.nodes for size in getattr(node.meta.get("val"), "shape", ()))


def test_compaction_of_pools_is_undone(captured: CapturedProgram, cleaned: tuple[CapturedProgram, PassRecord]) -> None:
    record = cleaned[1]
    symbolic = any("u0" in str(node.meta.get("val")) for node in captured.graph_module.graph.nodes)
    assert record.result.statistics.get("compactions-undone", 0) == int(symbolic)
    assert symbolic == (captured.info["model_type"].startswith("glm5"))
    assert [remark.kind for remark in record.result.remarks] == ["passed"] * int(symbolic)


@pytest.mark.parametrize("length", [0, 1, 5, 17, 31])
def test_outputs_and_caches_are_the_same_bits(
    length: int, captured: CapturedProgram, cleaned: tuple[CapturedProgram, PassRecord], run: Callable[..., Any]
) -> None:
    given = tensors(captured, seed=length, length=length)
    expected, found = run(captured, *given), run(cleaned[0], *given)
    changed = 0
    for spec, before, old, new in zip(captured.inputs, given, expected[1], found[1], strict=True):
        assert torch.equal(old, new), spec.source
        changed += int(not torch.equal(before, old))
    assert changed >= 4
    for old, new in zip(expected[0], found[0], strict=True):
        assert torch.equal(old, new) and old.isfinite().all() and old.std() > 0
