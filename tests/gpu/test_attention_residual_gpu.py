"""Attention residuals at width: every form that the schedule picks, and chains of launches that start early."""

import pytest
import torch

from kimigraph.codegen.specialize.attention_residual import form
from kimigraph.ir.reference.attention_residual import attention_residual

pytestmark = pytest.mark.gpu
WIDTH = 7168
ATTRIBUTES = {"eps": 1e-5, "out_eps": 1e-5}


def operands_of(tokens, sources, width=WIDTH):
    generator = torch.Generator().manual_seed(tokens + sources)

    def normal(*sizes):
        return torch.randn(*sizes, generator=generator)

    return {
        "sources": [(normal(1, tokens, width) * (1 + number)).bfloat16() for number in range(sources)],
        "query": (normal(1, width) * width**-0.5).bfloat16(),
        "norm_weight": (1 + 0.1 * normal(width)).bfloat16(),
        "out_norm_weight": (1 + 0.1 * normal(width)).bfloat16(),
    }


def launch_of(kernel, operands, target="cuda"):
    flat = {f"sources_{number}": source for number, source in enumerate(operands["sources"])}
    rest = {name: value for name, value in operands.items() if name != "sources"}
    return kernel("attention_residual", {**flat, **rest}, ATTRIBUTES, target=target)


def on_device(operands):
    return {k: [x.cuda() for x in v] if isinstance(v, list) else v.cuda() for k, v in operands.items()}


@pytest.mark.parametrize("width", [WIDTH, 2304, 1000])
@pytest.mark.parametrize("sources", [2, 5, 9])
@pytest.mark.parametrize("tokens", [1, 7, 64, 100, 300])
def test_at_width(kernel, tokens, sources, width):
    operands = operands_of(tokens, sources, width)
    there = on_device(operands)
    module = launch_of(kernel, there)
    hopper = torch.cuda.get_device_capability() == (9, 0)
    assert hasattr(module, "mix_cluster") == (hopper and form(tokens, sources, width, pair=sources == 2)[0] > 1)
    found = module.launch(*there.values())
    torch.testing.assert_close(found.cpu(), attention_residual(**operands, **ATTRIBUTES), rtol=1e-2, atol=2e-2)


@pytest.mark.parametrize("tokens", [1, 20, 64, 300])
@pytest.mark.parametrize("size", [1.0, 60.0])
def test_two_sources_that_nearly_cancel_out(kernel, tokens, size):
    """The norm of two sources comes from their products: what is left of them is small, and must be right."""
    operands = operands_of(tokens, 2)
    one = operands["sources"][0] * size
    operands["sources"] = [one, (-one * (1 + 0.05 * torch.randn(one.shape))).bfloat16()]
    operands["query"] *= 0
    there = on_device(operands)
    found = launch_of(kernel, there).launch(*there.values())
    exact = attention_residual(
        [source.double() for source in operands["sources"]],
        *[operands[name].double() for name in ("query", "norm_weight", "out_norm_weight")],
        **ATTRIBUTES,
    )
    torch.testing.assert_close(found.cpu().double(), exact, rtol=1e-2, atol=2e-2)


@pytest.mark.parametrize(("tokens", "sources"), [(1, 2), (1, 9), (20, 2), (64, 2), (64, 5)])
def test_a_chain_of_launches_waits_for_what_it_reads(kernel, tokens, sources):
    """Each launch reads what the one before it wrote; programs may start early, but not read early."""
    there = on_device(operands_of(tokens, sources))
    module = launch_of(kernel, there)
    *blocks, first = there["sources"]
    weights = [there[name] for name in ("query", "norm_weight", "out_norm_weight")]

    def chain(wait):
        x = first
        for _ in range(30):
            x = module.launch([*blocks, x], *weights)
            wait()
        return x

    wanted = chain(torch.cuda.synchronize)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = chain(lambda: None)
    for _ in range(10):
        graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(found, wanted)
