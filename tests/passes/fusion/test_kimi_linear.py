"""``raise-kda`` on transformers' kimi_linear, whose decay has no bound: every KDA layer of an unmarked decode step."""

import pytest
import torch
from torch import Tensor, nn

from kimigraph.adapters.transformers_cache import CacheBuilder
from kimigraph.adapters.transformers_models import new_cache
from kimigraph.capture import capture_module
from kimigraph.ir.config import CompileConfig
from kimigraph.ir.operators import OPERATORS
from kimigraph.passes.base import PassContext
from kimigraph.passes.canonicalize import Canonicalize
from kimigraph.passes.raise_kda import RaiseKda

LAYERS, BATCH, HIDDEN = 3, 2, 32
Given = tuple[nn.Module, Tensor, dict[str, Tensor]]


class KdaLayers(nn.Module):
    """The KDA layers of a model in a row, each with its own part of the cache."""

    def __init__(self, layers: list[nn.Module], builder: CacheBuilder) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self._builder = builder

    def forward(self, hidden: Tensor, cache: dict[str, Tensor]) -> Tensor:
        rebuilt = self._builder.build(cache)
        for layer in self.layers:
            hidden = hidden + layer(hidden, cache=rebuilt)
        return hidden


@pytest.fixture
def step() -> Given:
    """Layers of transformers with random weights, hidden states, and caches in the middle of a sequence."""
    modeling = pytest.importorskip("transformers.models.kimi_linear.modeling_kimi_linear")
    config = modeling.KimiLinearConfig(
        hidden_size=HIDDEN, num_hidden_layers=LAYERS, layer_types=["linear_attention"] * LAYERS, linear_num_heads=3,
        linear_head_dim=8,
    )  # fmt: skip
    torch.manual_seed(0)
    layers = [modeling.KimiLinearDeltaAttention(config, index).eval().requires_grad_(False) for index in range(LAYERS)]
    for layer in layers:
        for parameter in layer.parameters():
            parameter.data = torch.randn(parameter.shape) * 0.3
    cache, tensors = new_cache(config, BATCH, 16, torch.float32, has_state=True)
    flat = {item.name: torch.randn(item.shape).to(item.dtype) * 0.1 for item in tensors}
    return KdaLayers(layers, CacheBuilder(cache, tensors)), torch.randn(BATCH, 1, HIDDEN), flat


def copied(cache: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in cache.items()}


def test_every_layer_of_an_unmarked_step_is_found(step: Given) -> None:
    module, hidden, cache = step
    context = PassContext(CompileConfig(marks=False))
    after = copied(cache)
    expected = module(hidden, after)
    program = capture_module(module, (hidden, copied(cache)), {}, context.config)
    Canonicalize().apply(program, context)
    result = RaiseKda().apply(program, context)
    nodes = [n for n in program.graph_module.graph.nodes if n.target is OPERATORS["kda_decode"].overload]
    assert len(nodes) == LAYERS and [remark.kind for remark in result.remarks] == ["passed"] * LAYERS
    assert all(node.kwargs["lower_bound"] is None and node.kwargs["state_layout"] == "kv" for node in nodes)
    assert all(node.args[8] is not None and node.args[9] is not None for node in nodes), "the gated norm is inside"
    given = copied(cache)
    program.graph_module.recompile()
    inputs = [program.tensors[s.name] if s.bound else given.get(s.source, hidden) for s in program.inputs]
    found = program.graph_module(*inputs)[0]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    for name, tensor in after.items():
        assert not torch.equal(tensor, cache[name])
        torch.testing.assert_close(given[name], tensor, rtol=1e-4, atol=1e-4)
