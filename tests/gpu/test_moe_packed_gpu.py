"""Routed experts over MXFP4 weights at the widths of Kimi K3.1: results, and the same bits at every call and replay."""

import pytest
import torch

from kimigraph.ir.reference.moe_experts import moe_experts
from kimigraph.ir.reference.mxfp4_quantize import mxfp4_quantize

pytestmark = pytest.mark.gpu
WIDTH, INNER, OUTER, EXPERTS = 1152, 1024, 2304, 32
ATTRIBUTES = {
    "picks": 8, "renormalize": True, "scale": 1.0, "groups": 1, "group_picks": 1, "activation": "situ", "beta": 4.0,
    "linear_beta": 25.0, "limit": None, "eps": 1e-5,
}  # fmt: skip
BEHIND = ("norm_weight", "up", "shared_gate", "shared_up", "shared_down")


def operands(tokens, follows, dtype=torch.bfloat16):
    generator = torch.Generator("cuda").manual_seed(tokens)

    def normal(*sizes, scale=1.0):
        return torch.randn(*sizes, generator=generator, device="cuda") * scale

    given = {
        "x": normal(tokens, WIDTH).to(dtype),
        "logits": normal(tokens, EXPERTS),
        "bias": normal(EXPERTS, scale=0.1),
        "gate_up": mxfp4_quantize(normal(EXPERTS, 2 * INNER, WIDTH, scale=WIDTH**-0.5)),
        "down": mxfp4_quantize(normal(EXPERTS, WIDTH, INNER, scale=INNER**-0.5)),
        "norm_weight": normal(WIDTH).to(dtype),
        "up": normal(OUTER, WIDTH, scale=WIDTH**-0.5).to(dtype),
        "shared_gate": normal(tokens, INNER).to(dtype),
        "shared_up": normal(tokens, INNER).to(dtype),
        "shared_down": normal(OUTER, INNER, scale=INNER**-0.5).to(dtype),
    }
    return given if follows else given | dict.fromkeys(BEHIND)


def close(found, wanted, limit):
    torch.testing.assert_close(
        found.float(), wanted.float(), rtol=limit, atol=limit * float(wanted.float().abs().max())
    )


@pytest.mark.parametrize(
    ("tokens", "follows", "dtype", "limit"),
    [
        (1, True, torch.bfloat16, 2e-2),
        (1, False, torch.float32, 1e-5),
        (2, False, torch.bfloat16, 2e-2),
        (8, True, torch.bfloat16, 2e-2),
        (64, False, torch.bfloat16, 2e-2),
        (2500, False, torch.bfloat16, 2e-2),
        (5, True, torch.float32, 1e-5),
    ],
)
def test_at_width(kernel, tokens, follows, dtype, limit):
    given = operands(tokens, follows, dtype)
    module = kernel("moe_experts", given, ATTRIBUTES, target="cuda")
    out, chosen = module.launch(*given.values())
    wanted, picks = moe_experts(*given.values(), **ATTRIBUTES)
    assert torch.equal(chosen, picks)
    close(out, wanted, limit)
    assert all(torch.equal(module.launch(*given.values())[0], out) for _ in range(3))


@pytest.mark.parametrize("tokens", [1, 8])
def test_a_graph_follows_the_router(kernel, tokens):
    given = operands(tokens, True)
    module = kernel("moe_experts", given, ATTRIBUTES, target="cuda")
    module.launch(*given.values())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, chosen = module.launch(*given.values())
    for _ in range(2):
        given["logits"].normal_()
        graph.replay()
        wanted, picks = moe_experts(*given.values(), **ATTRIBUTES)
        assert torch.equal(chosen, picks)
        close(out, wanted, 2e-2)
