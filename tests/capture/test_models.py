"""Public models captured: 16 decode steps equal to eager, caches in place, names and facts of the inputs."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import DEEPSEEK, GLM, GLM_TEXT, KIMI, write_model
from torch import Tensor
from torch.utils import _pytree as pytree

from kimigraph.capture import capture, load_source
from kimigraph.capture.program import tensors_of
from kimigraph.capture.source import ModelSource
from kimigraph.ir.config import CompileConfig
from kimigraph.ir.program import CapturedProgram

pytest.importorskip("transformers")

ATEN = torch.ops.aten
DECODE = CompileConfig(batch=2, context=24)


def captured(tmp_path: Path, document: dict[str, Any], config: CompileConfig) -> tuple[ModelSource, CapturedProgram]:
    source = load_source(write_model(tmp_path / "model", document), config)
    return source, capture(source, config)


def caches(args: Any) -> dict[str, Tensor]:
    return {name: leaf for part in args if isinstance(part, dict) for name, leaf in part.items()}


def advance(args: Any, step: int, vocabulary: int) -> None:
    """The next step's tokens; models that count tokens in an argument get the new count."""
    args[0].copy_(torch.randint(0, vocabulary, args[0].shape, generator=torch.Generator().manual_seed(step)))
    if isinstance(args[1], Tensor):
        args[1].add_(args[0].shape[1])


@pytest.mark.parametrize("document", [DEEPSEEK, GLM, KIMI], ids=lambda document: document["model_type"])
def test_sixteen_steps_equal_eager(tmp_path: Path, document: dict[str, Any]) -> None:
    source, program = captured(tmp_path, document, DECODE)
    module, ours, _ = source.build(length=5)
    _, theirs, _ = source.build(length=5)
    pointers = [leaf.data_ptr() for leaf in pytree.tree_leaves(ours)]
    scale = 0.0
    with torch.no_grad():
        for step in range(16):
            advance(ours, step, 96)
            advance(theirs, step, 96)
            want = module(*theirs)
            (got,) = program.graph_module(*tensors_of(program, ours, {}))
            torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
            scale = max(scale, want.abs().max().item())
    assert scale > 0.1
    for name, tensor in caches(ours).items():
        torch.testing.assert_close(tensor, caches(theirs)[name], rtol=1e-6, atol=1e-6)
    assert [leaf.data_ptr() for leaf in pytree.tree_leaves(ours)] == pointers
    assert set(program.info["mutations"].values()) == {"in place"}


def test_flat_inputs_of_deepseek(tmp_path: Path) -> None:
    _, program = captured(tmp_path, DEEPSEEK, DECODE)
    specs = {spec.source: spec for spec in program.inputs}
    assert [spec.name for spec in program.inputs] == list(program.placeholders)
    assert specs["cache.1.latent"].name == "cache_1_latent"
    assert specs["cache.1.latent"].shape == (2, 1, 24, 24)
    assert specs["cache.0.rope"].shape == (2, 1, 24, 8)
    assert specs["cache.0.index_key"].descriptor == "index_key{layout=contiguous,dtype=float32,width=16,page_size=0}"
    assert specs["input_ids"].value_range == (0, 96)
    assert {name: spec.value_range for name, spec in specs.items() if name.endswith("length")} == {
        f"cache.{layer}.{name}": (23, 24) for layer in (0, 1) for name in ("length", "index_length")
    }
    assert specs["model.layers.0.self_attn.indexer.wk.weight"].kind == "weight"
    assert specs["model.layers.1.mlp.gate.e_score_correction_bias"].kind == "weight"
    assert specs["model.rotary_emb.inv_freq"].kind == "constant"
    mutated = {name for name, spec in specs.items() if spec.mutated}
    assert mutated == {name for name in specs if name.startswith("cache.")}
    assert all(specs[name].kind == "cache" for name in mutated)
    assert [output.source for output in program.outputs] == ["logits"]


def test_every_node_has_value_place_and_module(tmp_path: Path) -> None:
    from kimigraph.ir.provenance import module_path, source_line

    _, program = captured(tmp_path, DEEPSEEK, DECODE)
    nodes = [node for node in program.graph_module.graph.nodes if node.op == "call_function"]
    assert all("val" in node.meta for node in program.graph_module.graph.nodes if node.op != "output")
    assert not [node.name for node in nodes if not source_line(node)]
    picks = [node for node in nodes if node.target is ATEN.topk.default and node.args[1] == 8]
    assert [module_path(node) for node in picks] == [f"model.layers.{layer}.self_attn.indexer" for layer in (0, 1)]


def test_flat_inputs_of_glm(tmp_path: Path) -> None:
    """The multimodal wrapper gives its text part; a rope of width 0 is no cache; the pooled indexer packs its keys."""
    source, program = captured(tmp_path, GLM, DECODE)
    specs = {spec.source: spec for spec in program.inputs}
    assert specs["state.0.kda"].descriptor == "state{layout=kv,dtype=float32,heads=3,key_dim=8,value_dim=8}"
    assert specs["state.0.conv"].descriptor == "conv{channels=72,width=4,columns=4}"
    assert specs["cache.1.index_packed"].shape == (2, 24, 33)
    assert "cache.1.rope" not in specs
    assert "model.language_model.embed_tokens.weight" in specs and "lm_head.weight" in specs
    assert not [name for name in specs if "visual" in name]
    _, args, _ = source.build(length=5)
    assert args[1]["cache.1.index_packed"][0, :, -1].tolist() == [1.0] * 5 + [0.0] * 19


def test_plain_glm_text_gives_hidden_states(tmp_path: Path) -> None:
    _, program = captured(tmp_path, GLM_TEXT, DECODE)
    assert [output.source for output in program.outputs] == ["hidden_states"]
    assert "embed_tokens.weight" in {spec.source for spec in program.inputs}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_both_attentions_of_transformers(tmp_path: Path, attention: str) -> None:
    from kimigraph.adapters.transformers_models import Implementations
    from kimigraph.capture.source import read_config
    from kimigraph.capture.transformers_source import transformers_source

    directory = Path(write_model(tmp_path, DEEPSEEK))
    source = transformers_source(directory, read_config(directory), DECODE, 0, Implementations(attention))
    program = capture(source, DECODE)
    targets = {node.target for node in program.graph_module.graph.nodes}
    assert (ATEN.scaled_dot_product_attention.default in targets) == (attention == "sdpa")
    module, args, _ = source.build()
    (got,) = program.graph_module(*tensors_of(program, source.build()[1], {}))
    torch.testing.assert_close(got, module(*args), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "config",
    [
        CompileConfig(batch=1, context=24),
        CompileConfig(batch=2, context=24, tokens=3),
        CompileConfig(batch=2, context=5),
        CompileConfig(batch=2, context=24, phase="prefill", tokens=20),
        CompileConfig(batch=2, context=24, dtype="bfloat16"),
    ],
    ids=["one sequence", "three tokens", "k beyond context", "prefill", "bfloat16"],
)
@pytest.mark.parametrize("document", [DEEPSEEK, GLM], ids=lambda document: document["model_type"])
def test_other_steps(tmp_path: Path, document: dict[str, Any], config: CompileConfig) -> None:
    source, program = captured(tmp_path, document, config)
    for length in (0, source.shape.default_length if source.shape else 0):
        module, theirs, _ = source.build(length)
        _, ours, _ = source.build(length)
        with torch.no_grad():
            want = module(*theirs)
            (got,) = program.graph_module(*tensors_of(program, ours, {}))
        tolerance = 5e-5 if config.phase == "prefill" else 1e-6
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
        for name, tensor in caches(ours).items():
            torch.testing.assert_close(tensor, caches(theirs)[name], rtol=tolerance, atol=tolerance)
    assert bool(program.info["notes"]) == (config.context == 5)


def test_bfloat16_keeps_what_the_model_keeps(tmp_path: Path) -> None:
    """Router weights and delta-rule parameters stay in fp32, states too."""
    _, program = captured(tmp_path, GLM, CompileConfig(batch=1, context=16, dtype="bfloat16"))
    dtypes = {spec.source.removeprefix("model.language_model."): spec.dtype for spec in program.inputs}
    assert dtypes["embed_tokens.weight"] == "bfloat16"
    assert dtypes["layers.0.self_attn.forget_gate.A_log"] == "float32"
    assert dtypes["layers.0.self_attn.conv1d.weight"] == "float32"
    assert dtypes["layers.1.mlp.gate.weight"] == "float32"
    assert dtypes["state.0.kda"] == "float32" and dtypes["state.0.conv"] == "bfloat16"
