import math

import pytest
import torch

from kimigraph.models.initialization import initialize
from kimigraph.models.kimi_k31.moe import LatentMoE, SiTU


def situ(gate, up, beta, linear_beta):
    capped = up if linear_beta is None else linear_beta * math.tanh(up / linear_beta)
    return beta * math.tanh(gate / beta) / (1 + math.exp(-gate)) * capped


def mlp(x, gate, up, down):
    g, u = gate @ x, up @ x
    inner = [situ(a, b, 4.0, 25.0) for a, b in zip(g.tolist(), u.tolist(), strict=True)]
    return down @ torch.tensor(inner, dtype=x.dtype)


def per_token(moe, config, x):
    """Equation 11 of the Kimi K3 report in fp64, token by token and expert by expert."""
    weights = {name: parameter.double() for name, parameter in moe.named_parameters()}
    gate_up, width = weights["experts.gate_up_proj"], config.moe_intermediate_size
    out = torch.zeros(x.shape, dtype=torch.float64)
    for b, s in [(b, s) for b in range(x.shape[0]) for s in range(x.shape[1])]:
        token = x[b, s].double()
        scores = torch.sigmoid(weights["gate.weight"] @ token)
        chosen = (scores + weights["gate.e_score_correction_bias"]).sort(descending=True).indices
        chosen = chosen[: config.num_experts_per_token].tolist()
        total = sum(scores[e] for e in chosen) if config.moe_renormalize else 1.0
        latent, routed = weights["routed_expert_down_proj.weight"] @ token, 0.0
        for e in chosen:
            expert = mlp(latent, gate_up[e, :width], gate_up[e, width:], weights["experts.down_proj"][e])
            routed = routed + expert * scores[e] / total * config.routed_scaling_factor
        if config.latent_moe_use_norm:
            rms = (routed.square().mean() + config.rms_norm_eps).sqrt()
            routed = routed / rms * weights["routed_expert_norm.weight"]
        out[b, s] = weights["routed_expert_up_proj.weight"] @ routed
        if config.num_shared_experts:
            shared = (weights[f"shared_experts.{part}_proj.weight"] for part in ("gate", "up", "down"))
            out[b, s] += mlp(token, *shared)
    return out


FORMS = ["gathered", "grouped", "exhaustive"]


@pytest.mark.parametrize(
    ("tokens", "dtype", "form"), [(2, "float32", 0), (2, "bfloat16", 0), (9, "bfloat16", 1), (9, "float32", 2)]
)
def test_against_a_loop_over_tokens(configure, monkeypatch, tokens, dtype, form):
    config = configure(dtype=dtype)
    moe = initialize(LatentMoE(config).requires_grad_(False), seed=3)
    taken = []
    for name in FORMS:
        original = getattr(moe.experts, name)
        monkeypatch.setattr(
            moe.experts, name, lambda *args, original=original, name=name: taken.append(name) or original(*args)
        )
    x = torch.randn(2, tokens, 64, dtype=config.torch_dtype)
    got, want = moe(x), per_token(moe, config, x)
    assert taken == [FORMS[form]]
    assert got.dtype == config.torch_dtype
    tolerance = 1e-5 if dtype == "float32" else 3e-2
    torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    "fields",
    [
        {"moe_renormalize": False},
        {"routed_scaling_factor": 2.5, "latent_moe_use_norm": False},
        {"num_shared_experts": 0},
        {"num_shared_experts": 3},
        {"num_experts_per_token": 1},
    ],
)
def test_variants_against_a_loop_over_tokens(configure, fields):
    config = configure(**fields)
    moe = initialize(LatentMoE(config).requires_grad_(False), seed=4)
    x = torch.randn(1, 5, 64)
    torch.testing.assert_close(moe(x).double(), per_token(moe, config, x), rtol=1e-5, atol=1e-5)


def test_the_three_forms_agree(configure):
    experts = initialize(LatentMoE(configure()).requires_grad_(False), seed=5).experts
    x, picks = torch.randn(7, 32), torch.tensor([[0, 7], [7, 0], [3, 3], [0, 1], [1, 2], [2, 0], [7, 6]])
    gathered = experts.gathered(x, picks)
    torch.testing.assert_close(experts.grouped(x, picks), gathered)
    torch.testing.assert_close(experts.exhaustive(x, picks), gathered)


def test_bias_steers_the_choice_alone(configure):
    router = initialize(LatentMoE(configure()).requires_grad_(False), seed=6).gate
    x = torch.randn(4, 64)
    router.e_score_correction_bias.zero_()
    router.e_score_correction_bias[5] = 10.0
    experts, weights = router(x)
    assert (experts == 5).any(-1).all()
    torch.testing.assert_close(weights.sum(-1), torch.ones(4))
    scores = torch.sigmoid(x @ router.weight.T).gather(-1, experts)
    torch.testing.assert_close(weights, scores / scores.sum(-1, keepdim=True))


@pytest.mark.parametrize("linear_beta", [25.0, None])
def test_situ(linear_beta):
    gate, up = torch.randn(50) * 20, torch.randn(50) * 40
    want = [situ(g, u, 4.0, linear_beta) for g, u in zip(gate.tolist(), up.tolist(), strict=True)]
    torch.testing.assert_close(SiTU(4.0, linear_beta)(gate, up), torch.tensor(want), rtol=1e-5, atol=1e-5)
