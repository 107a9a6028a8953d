"""Two interleaved half-batches on the device: forced onto several streams, replays have the bits of one stream."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import kimigraph
from kimigraph.ir.config import CompileConfig

pytestmark = pytest.mark.gpu

BATCH, WIDTH, STATES = 8, 128, 4
REPLAYS = 100


class Chain(nn.Module):
    """Each row times matrices of its own, which it changes, and weights that all rows share."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5) for _ in range(STATES))

    def forward(self, x: Tensor, cache: dict[str, Tensor]) -> Tensor:
        for weight, state in zip(self.weights, cache.values(), strict=True):
            x = (state @ (x @ weight)[:, :, None])[:, :, 0].tanh()
            state[:, 0].copy_(x)
        return x


def call() -> tuple[Tensor, dict[str, Tensor]]:
    make = partial(torch.randn, device="cuda", generator=torch.Generator("cuda").manual_seed(3))
    return make(BATCH, WIDTH), {f"state.{n}": make(BATCH, WIDTH, WIDTH) / WIDTH**0.5 for n in range(STATES)}


@torch.no_grad()
def test_halves_on_several_streams_have_the_bits_of_one_and_the_values_of_the_model() -> None:
    model = Chain().cuda()
    config = CompileConfig(target="cuda", half_batches="on", cache="off", cuda_graph=True, force_streams=True)
    many, one = (
        kimigraph.optimize(model, call(), c) for c in (config, replace(config, force_streams=False, streams=1))
    )
    streams = [compiled.report().streams for compiled in (many, one)]
    assert [item is not None and item["count"] > 1 for item in streams] == [True, False]
    (x, ours), (_, theirs), (_, wanted) = call(), call(), call()
    for number in range(REPLAYS):
        results = many(x, ours), one(x, theirs)
        assert torch.equal(*results), number
        assert all(torch.equal(ours[name], theirs[name]) for name in ours), number
        if number < 2:
            torch.testing.assert_close(results[0], model(x, wanted), rtol=1e-2, atol=1e-2)
        x = torch.randn_like(x)
    assert many.graphs is not None and many.graphs.captured == 1
