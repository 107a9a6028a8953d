"""Public models captured: 16 decode steps equal to eager, caches in place, names and facts of the inputs."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from tiny_models import DEEPSEEK, GLM, KIMI, write_model
from torch import Tensor
from torch.utils import _pytree as pytree

from kimigraph.capture import capture, load_source
from kimigraph.capture.program import tensors_of
from kimigraph.capture.source import ModelSource
from kimigraph.ir.config import CompileConfig
from kimigraph.ir.program import CapturedProgram
from kimigraph.ir.provenance import module_path, source_line

pytest.importorskip("transformers")

ATEN = torch.ops.aten
DECODE = CompileConfig(batch=2, context=24)


DOCUMENTS = {"deepseek": DEEPSEEK, "glm": GLM, "kimi": KIMI}


@pytest.fixture(scope="module")
def captured(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[ModelSource, CapturedProgram]]:
    """A model's source and captured decode step, made once."""

    @cache
    def make(name: str) -> tuple[ModelSource, CapturedProgram]:
        source = load_source(write_model(tmp_path_factory.mktemp(name), DOCUMENTS[name]), DECODE)
        return source, capture(source, DECODE)

    return make


Captured = Callable[[str], tuple[ModelSource, CapturedProgram]]


def caches(args: Any) -> dict[str, Tensor]:
    return {name: leaf for part in args if isinstance(part, dict) for name, leaf in part.items()}


def advance(args: Any, step: int, vocabulary: int) -> None:
    """The next step's tokens; models that count tokens in an argument get the new count."""
    args[0].copy_(torch.randint(0, vocabulary, args[0].shape, generator=torch.Generator().manual_seed(step)))
    if isinstance(args[1], Tensor):
        args[1].add_(args[0].shape[1])


@pytest.mark.parametrize("name", DOCUMENTS)
def test_sixteen_steps_equal_eager(captured: Captured, name: str) -> None:
    source, program = captured(name)
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


def test_flat_inputs_of_deepseek(captured: Captured) -> None:
    _, program = captured("deepseek")
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


def test_every_node_has_value_place_and_module(captured: Captured) -> None:
    _, program = captured("deepseek")
    nodes = [node for node in program.graph_module.graph.nodes if node.op == "call_function"]
    assert all("val" in node.meta for node in program.graph_module.graph.nodes if node.op != "output")
    assert not [node.name for node in nodes if not source_line(node)]
    picks = [node for node in nodes if node.target is ATEN.topk.default and node.args[1] == 8]
    assert [module_path(node) for node in picks] == [f"model.layers.{layer}.self_attn.indexer" for layer in (0, 1)]


def test_flat_inputs_of_glm(captured: Captured) -> None:
    """The multimodal wrapper gives its text part; a rope of width 0 is no cache; the pooled indexer packs its keys."""
    source, program = captured("glm")
    specs = {spec.source: spec for spec in program.inputs}
    assert specs["state.0.kda"].descriptor == "state{layout=kv,dtype=float32,heads=3,key_dim=8,value_dim=8}"
    assert specs["state.0.conv"].descriptor == "conv{channels=72,width=4,columns=4}"
    assert specs["cache.1.index_packed"].shape == (2, 24, 33)
    assert "cache.1.rope" not in specs
    assert "model.language_model.embed_tokens.weight" in specs and "lm_head.weight" in specs
    assert not [name for name in specs if "visual" in name]
    _, args, _ = source.build(length=5)
    assert args[1]["cache.1.index_packed"][0, :, -1].tolist() == [1.0] * 5 + [0.0] * 19
