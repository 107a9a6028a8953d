"""``torch.compile(model, backend="kimigraph")`` on a GPU: decode steps of a tiny K3.1 against eager, in two modes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from kimigraph import CompileConfig, TorchBackend
from kimigraph.capture import load_source

MODEL = str(Path(__file__).parents[2] / "examples" / "k31_tiny")
pytestmark = pytest.mark.gpu


def moved(value: Any) -> Any:
    return torch.utils._pytree.tree_map(lambda x: x.cuda() if isinstance(x, torch.Tensor) else x, value)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@torch.no_grad()
def test_decode_steps_equal_eager_and_use_the_same_programs(mode: str) -> None:
    torch._dynamo.reset()
    counters.clear()
    shape = CompileConfig(batch=2, context=256, dtype="float32", overrides=(("num_hidden_layers", "4"),))
    source = load_source(MODEL, shape)
    model, (ids, lengths, cache), _ = source.build(length=100)
    model, ids, lengths, cache = model.cuda(), ids.cuda(), lengths.cuda(), moved(cache)
    theirs = {name: tensor.clone() for name, tensor in cache.items()}
    backend = TorchBackend(mode)
    step = torch.compile(model, backend=backend)
    for number in range(6):
        got, want = step(ids, lengths, cache), model(ids, lengths, theirs)
        scale = want.abs().max()
        assert (got - want).abs().max() <= 1e-3 * scale, number
        for name, tensor in cache.items():
            assert (tensor - theirs[name]).abs().max() <= 1e-3 * theirs[name].abs().max().clamp_min(1), name
        ids = want.argmax(-1)
        lengths += 1
    assert counters["stats"]["unique_graphs"] == 1
    ((_, compiled),) = backend.graphs[0].programs
    report = compiled.report()
    assert report.target == "cuda"
    fused = {entry["rule"]: entry["count"] for entry in report.fusions}
    assert fused["fuse-lightning-indexer"] >= 1 and fused["fuse-sparse-attention"] >= 1 and fused["raise-kda"] >= 1
    assert (compiled.graphs is not None) == (mode == "reduce-overhead")
