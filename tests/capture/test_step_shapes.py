"""Steps of other shapes, types and spellings: equal to eager at the first and the last place of the context."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import DEEPSEEK, GLM_TEXT, write_model
from torch.utils import _pytree as pytree

from kimigraph.adapters.transformers_models import Implementations
from kimigraph.capture import capture, load_source
from kimigraph.capture.program import tensors_of
from kimigraph.capture.source import ModelSource, read_config
from kimigraph.capture.transformers_source import transformers_source
from kimigraph.ir.config import CompileConfig
from kimigraph.ir.program import CapturedProgram

pytest.importorskip("transformers")

ATEN = torch.ops.aten


def assert_steps_equal_eager(source: ModelSource, program: CapturedProgram, tolerance: float = 1e-6) -> None:
    assert source.shape is not None
    for length in {0, source.shape.default_length}:
        module, theirs, _ = source.build(length)
        _, ours, _ = source.build(length)
        with torch.no_grad():
            want = module(*theirs)
            (got,) = program.graph_module(*tensors_of(program, ours, {}))
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
        for mine, eager in zip(pytree.tree_leaves(ours), pytree.tree_leaves(theirs), strict=True):
            torch.testing.assert_close(mine, eager, rtol=tolerance, atol=tolerance)


def captured(tmp_path: Path, document: dict[str, Any], config: CompileConfig) -> tuple[ModelSource, CapturedProgram]:
    source = load_source(write_model(tmp_path, document), config)
    return source, capture(source, config)


def test_several_tokens_of_one_sequence_with_k_beyond_the_context(tmp_path: Path) -> None:
    source, program = captured(tmp_path, DEEPSEEK, CompileConfig(batch=1, tokens=3, context=5))
    assert_steps_equal_eager(source, program)
    assert program.info["notes"] == ["index_topk 8 is larger than the context 5: the indexer picks every visible token"]
    picks = [node.args[1] for node in program.graph_module.graph.nodes if node.target is ATEN.topk.default]
    assert picks[0] == 5


def test_prefill_starts_empty_and_fills_the_context(tmp_path: Path) -> None:
    source, program = captured(tmp_path, DEEPSEEK, CompileConfig(batch=2, context=12, phase="prefill"))
    assert_steps_equal_eager(source, program)
    shapes = {spec.source: (spec.shape, spec.value_range) for spec in program.inputs}
    assert shapes["input_ids"][0] == (2, 12) and shapes["cache.0.length"][1] == (0, 1)


def test_eager_attention_of_transformers(tmp_path: Path) -> None:
    directory, config = Path(write_model(tmp_path, DEEPSEEK)), CompileConfig(batch=2, context=24)
    source = transformers_source(directory, read_config(directory), config, 0, Implementations("eager"))
    program = capture(source, config)
    targets = {node.target for node in program.graph_module.graph.nodes}
    assert ATEN.softmax.int in targets and ATEN.scaled_dot_product_attention.default not in targets
    assert_steps_equal_eager(source, program)


def test_bfloat16_keeps_what_the_model_keeps(tmp_path: Path) -> None:
    """Router weights and delta-rule parameters stay in fp32, and so do recurrent states."""
    source, program = captured(tmp_path, GLM_TEXT, CompileConfig(batch=1, context=16, dtype="bfloat16"))
    dtypes = {spec.source: spec.dtype for spec in program.inputs}
    assert dtypes["embed_tokens.weight"] == "bfloat16"
    assert dtypes["layers.0.self_attn.forget_gate.A_log"] == "float32"
    assert dtypes["layers.0.self_attn.conv1d.weight"] == "float32"
    assert dtypes["layers.1.mlp.gate.weight"] == "float32"
    assert dtypes["state.0.kda"] == "float32" and dtypes["state.0.conv"] == "bfloat16"
    assert [output.source for output in program.outputs] == ["hidden_states"]
    assert_steps_equal_eager(source, program)
