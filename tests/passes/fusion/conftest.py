"""Tiny public models, captured once each, and the comparison of a fused step with the eager model."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch.fx import Graph, Node

from kimigraph.capture import capture
from kimigraph.capture.kimi_source import kimi_source
from kimigraph.capture.source import ModelSource
from kimigraph.ir.config import CompileConfig
from kimigraph.ir.operators import OPERATORS
from kimigraph.ir.program import CapturedProgram
from kimigraph.ir.remarks import Remark
from kimigraph.ir.verifier import verify
from kimigraph.passes.base import PassContext
from kimigraph.passes.canonicalize import Canonicalize
from kimigraph.passes.fuse_lightning_indexer import FuseLightningIndexer
from kimigraph.passes.fuse_sparse_attention import FuseSparseAttention
from kimigraph.passes.raise_kda import RaiseKda

ATEN = torch.ops.aten
CONTEXT = 64
PASSES = (Canonicalize(), RaiseKda(), FuseLightningIndexer(), FuseSparseAttention())

MLA: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_shared_experts": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "kv_lora_rank": 32,
    "q_lora_rank": 48,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "index_topk": 8,
    "index_head_dim": 32,
    "index_n_heads": 32,
    "num_hidden_layers": 2,
    "mlp_layer_types": ["dense", "sparse"],
}
DOCUMENTS: dict[str, dict[str, Any]] = {
    "deepseek_v32": {**MLA, "model_type": "deepseek_v32", "head_dim": 16},
    "glm5_next": {
        **MLA,
        "model_type": "glm5_next_text",
        "qk_rope_head_dim": 0,
        "layer_types": ["linear_attention", "indexed_attention"],
        "indexer_types": ["full", "full"],
        "index_kpool": 4,
        "linear_head_dim": 16,
        "linear_num_heads": 4,
        "hc_mult": 2,
        "hc_sinkhorn_iters": 2,
    },
    "kimi_k31": {
        **json.loads((Path(__file__).parents[3] / "examples/k31_tiny/config.json").read_text()),
        "num_hidden_layers": 2,
        "index_topk": 8,
    },
}
DOCUMENTS["kimi_linear"] = {
    **{name: value for name, value in MLA.items() if not name.startswith(("index_", "q_lora"))},
    "model_type": "kimi_linear",
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_heads": 4,
    "linear_head_dim": 16,
}
DOCUMENTS["kimi_k31"]["linear_attn_config"] |= {"full_attn_layers": [2], "kda_layers": [1]}


@dataclass
class Step:
    """One captured decode step of a model, and what the eager model makes of it."""

    source: ModelSource
    program: CapturedProgram
    start: int

    @property
    def graph(self) -> Graph:
        return self.program.graph_module.graph

    def count(self, *targets: Any) -> int:
        """How many nodes call one of the targets."""
        return sum(node.target in targets for node in self.graph.nodes)

    def fused(self) -> dict[str, int]:
        """Calls of each semantic operator in the graph."""
        return {
            name: self.count(operator.overload) for name, operator in OPERATORS.items() if self.count(operator.overload)
        }

    def operator(self, name: str, index: int = 0) -> Node:
        """A call of a semantic operator."""
        return [node for node in self.graph.nodes if node.target is OPERATORS[name].overload][index]

    def fuse(self, passes: tuple[Any, ...] = PASSES) -> list[Remark]:
        """Run the passes, verifying the program after each; all their remarks."""
        remarks: list[Remark] = []
        for item in passes:
            result = item.apply(self.program, PassContext(CompileConfig()))
            verify(self.program)
            if item.fusion:
                remarks.extend(result.remarks)
        return remarks

    def error(self, steps: int = 8) -> float:
        """The largest difference to the eager model over some steps, caches included, by the largest value."""
        module, args, _ = self.source.build(self.start)
        ids, rest, caches = args[0], list(args[1:-1]), args[-1]
        own = {name: tensor.clone() for name, tensor in caches.items()}
        generator = torch.Generator().manual_seed(5)
        worst = 0.0
        if rest:  # lengths that differ from row to row
            rest[0] = torch.tensor([self.start, 5, 0][: len(rest[0])], dtype=rest[0].dtype)
        self.program.graph_module.recompile()
        with torch.no_grad():
            for _ in range(steps):
                ids = torch.randint(3, 100, ids.shape, generator=generator)
                expected = module(ids, *rest, caches)
                given = {"input_ids": ids, **dict(zip(["lengths"], rest, strict=False)), **own}
                specs = self.program.inputs
                tensors = [self.program.tensors[s.name] if s.bound else given[s.source] for s in specs]
                found = self.program.graph_module(*tensors)[0]
                worst = max(worst, relative(found, expected))
                rest = [tensor + ids.shape[1] for tensor in rest]
        return max([worst, *(relative(own[name], caches[name]) for name in caches)])


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference by largest value; exact equality is asked of integers."""
    assert found.dtype == expected.dtype and found.shape == expected.shape
    if not expected.numel():
        return 0.0
    if not expected.dtype.is_floating_point:
        return 0.0 if torch.equal(found, expected) else float("inf")
    difference = (found.float() - expected.float()).abs().max().item()
    return difference / max(1e-30, expected.float().abs().max().item())


@cache
def captured(model: str, attention: str, marks: bool, fields: str, options: str) -> tuple[ModelSource, CapturedProgram]:
    """The source and its captured program; ``fields`` override the configuration, ``options`` the compilation."""
    document = {**DOCUMENTS[model], **json.loads(fields)}
    config = replace(CompileConfig(batch=2, tokens=1, context=CONTEXT, marks=marks), **json.loads(options))
    with TemporaryDirectory() as directory:
        if model == "kimi_k31":
            source = kimi_source(Path(directory), document, config, 0)
        else:
            from kimigraph.adapters.transformers_models import Implementations
            from kimigraph.capture.transformers_source import transformers_source

            source = transformers_source(Path(directory), document, config, 0, Implementations(attention=attention))
        source.build(0)
        return source, capture(source, config)


def make_step(
    model: str,
    attention: str = "sdpa",
    *,
    marks: bool = True,
    start: int = 20,
    options: dict[str, Any] | None = None,
    **fields: Any,
) -> Step:
    """A fresh copy of a captured step."""
    source, program = captured(model, attention, marks, json.dumps(fields, sort_keys=True), json.dumps(options or {}))
    return Step(source, program.copy(), start)


@pytest.fixture
def step() -> Callable[..., Step]:
    return make_step
