"""Routed experts at the widths of Kimi K3.1: results, the same bits at every call, replays of one CUDA graph."""

import importlib.util

import pytest
import torch

from kimigraph.codegen.kernel import KernelRequest, TensorSpec
from kimigraph.codegen.specialize import moe_stream
from kimigraph.codegen.specialize.moe_sizes import Experts
from kimigraph.ir.reference.moe_experts import moe_experts

pytestmark = pytest.mark.gpu
WIDTH, INNER, OUTER, EXPERTS = 1152, 1024, 2304, 32
ATTRIBUTES = {
    "picks": 8, "renormalize": True, "scale": 1.0, "groups": 1, "group_picks": 1, "activation": "situ", "beta": 4.0,
    "linear_beta": 25.0, "limit": None, "eps": 1e-5,
}  # fmt: skip


def operands(tokens, follows, dtype=torch.bfloat16):
    generator = torch.Generator("cuda").manual_seed(tokens)

    def normal(*sizes, scale=1.0):
        return (torch.randn(*sizes, generator=generator, device="cuda") * scale).to(dtype)

    given = {
        "x": normal(tokens, WIDTH),
        "logits": normal(tokens, EXPERTS).float(),
        "bias": normal(EXPERTS, scale=0.1).float(),
        "gate_up": normal(EXPERTS, 2 * INNER, WIDTH, scale=WIDTH**-0.5),
        "down": normal(EXPERTS, WIDTH, INNER, scale=INNER**-0.5),
        "norm_weight": normal(WIDTH),
        "up": normal(OUTER, WIDTH, scale=WIDTH**-0.5),
        "shared_gate": normal(tokens, INNER),
        "shared_up": normal(tokens, INNER),
        "shared_down": normal(OUTER, INNER, scale=INNER**-0.5),
    }
    behind = ("norm_weight", "up", "shared_gate", "shared_up", "shared_down")
    return given | ({} if follows else dict.fromkeys(behind))


def close(found, wanted, limit=2e-2):
    torch.testing.assert_close(
        found.float(), wanted.float(), rtol=limit, atol=limit * float(wanted.float().abs().max())
    )


@pytest.mark.parametrize("follows", [True, False])
@pytest.mark.parametrize("tokens", [1, 2, 8, 16, 17, 64, 300, 2048, 2500])
def test_at_width(kernel, tokens, follows):
    given = operands(tokens, follows)
    module = kernel("moe_experts", given, ATTRIBUTES, target="cuda")
    out, chosen = module.launch(*given.values())
    wanted, picks = moe_experts(*given.values(), **ATTRIBUTES)
    assert torch.equal(chosen, picks)
    close(out, wanted)
    assert all(torch.equal(module.launch(*given.values())[0], out) for _ in range(3))


@pytest.mark.parametrize("tokens", [1, 5, 40])
def test_fp32_keeps_its_precision(kernel, tokens):
    given = operands(tokens, True, torch.float32)
    out, _ = kernel("moe_experts", given, ATTRIBUTES, target="cuda").launch(*given.values())
    close(out, moe_experts(*given.values(), **ATTRIBUTES)[0], 1e-5)


@pytest.mark.parametrize("tokens", [1, 8, 64, 1000])
def test_a_graph_follows_the_router(kernel, tokens):
    """One graph, replayed with other logits: who picks what is decided on the device."""
    given = operands(tokens, tokens <= 8)
    module = kernel("moe_experts", given, ATTRIBUTES, target="cuda")
    module.launch(*given.values())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, chosen = module.launch(*given.values())
    for fill in (None, 3):
        given["logits"].normal_()
        if fill is not None:
            given["logits"][:, fill : fill + 8] = 20.0  # everybody to the same eight
        graph.replay()
        wanted, picks = moe_experts(*given.values(), **ATTRIBUTES)
        assert torch.equal(chosen, picks)
        close(out, wanted)


@pytest.mark.parametrize(("width", "inner", "count"), [(1792, 3072, 12), (128, 1024, 300)])
def test_other_sizes_in_one_stream(tmp_path, width, inner, count):
    """Rows longer than a slot of the ring, which the form for one token takes only when told to; few units."""
    given = operands(1, False) | {
        "x": torch.randn(1, width, device="cuda").bfloat16(),
        "logits": torch.randn(1, count, device="cuda"),
        "bias": torch.zeros(count, device="cuda"),
        "gate_up": (torch.randn(count, 2 * inner, width, device="cuda") * width**-0.5).bfloat16(),
        "down": (torch.randn(count, width, inner, device="cuda") * inner**-0.5).bfloat16(),
    }
    request = KernelRequest("moe_experts", specifications(given), ATTRIBUTES, "cuda")
    path = tmp_path / "long_rows.py"
    path.write_text(moe_stream.build(request, Experts.of(request)).text, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    out, chosen = module.launch(*given.values())
    wanted, picks = moe_experts(*given.values(), **ATTRIBUTES)
    assert torch.equal(chosen, picks)
    close(out, wanted)


def specifications(given):
    return {
        name: None if t is None else TensorSpec(tuple(t.shape), t.stride(), str(t.dtype).removeprefix("torch."))
        for name, t in given.items()
    }
