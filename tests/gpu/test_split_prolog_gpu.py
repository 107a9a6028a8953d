"""A prolog in three branches on the device: replays of the forked program have the bits of the one on one stream."""

from pathlib import Path

import pytest
import torch

from kimigraph.bench.indexer_prolog import K31, captured_layer, forms
from kimigraph.bench.replay import captured
from kimigraph.codegen import build_artifact
from kimigraph.ir.config import CompileConfig
from kimigraph.ir.program import CapturedProgram
from kimigraph.ir.schedule import clear_streams, stream_of
from kimigraph.runtime.executor import Executor

pytestmark = pytest.mark.gpu

TOY = {
    "hidden_size": 256,
    "num_attention_heads": 4,
    "q_lora_rank": 128,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "index_n_heads": 32,
    "index_head_dim": 64,
    "index_topk": 16,
}
REPLAYS = 200


def built(program: CapturedProgram, directory: Path) -> Executor:
    directory.mkdir()
    build_artifact(program, "cuda", directory, self_test=False)
    return Executor(directory, {spec.source: program.tensors[spec.name] for spec in program.inputs if spec.bound})


def test_three_branches_have_the_bits_of_one_stream(tmp_path: Path) -> None:
    config = CompileConfig(target="cuda", context=64, streams=3)
    layer = captured_layer(1, config, "cuda", {**K31, **TOY})
    forked = forms(layer, config)["split, forced"]
    assert len({stream_of(node) for node in forked.graph_module.graph.nodes}) == 3
    single = forked.copy()
    clear_streams(single.graph_module.graph)
    generator = torch.Generator("cuda").manual_seed(2)
    first, second = built(forked, tmp_path / "forked"), built(single, tmp_path / "single")
    given = [_value(spec.shape, spec.dtype, generator) for spec in first.caller_inputs]
    own = [tensor.clone() for tensor in given]
    with torch.no_grad():
        wanted = [tensor.clone() for tensor in (*second(*own), *own)]
        results: list[torch.Tensor] = []
        graph = captured(lambda: results.extend(first(*given)))
        outputs = results[-len(forked.outputs) :]  # those of the capture: replays write there
        for _ in range(REPLAYS):
            graph.replay()
            torch.cuda.synchronize()
            assert all(map(torch.equal, (*outputs, *given), wanted))


def _value(shape: tuple[int, ...], dtype: str, generator: torch.Generator) -> torch.Tensor:
    if dtype.startswith("int"):
        return torch.full(shape, 40, dtype=getattr(torch, dtype), device="cuda")
    return torch.randn(shape, generator=generator, device="cuda").to(getattr(torch, dtype))
