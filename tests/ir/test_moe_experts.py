"""``moe_experts`` against the model's own block of experts, and its rules at the edges."""

from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import linear

from kimigraph.ir.operators import OPERATORS
from kimigraph.models.initialization import initialize
from kimigraph.models.kimi_k31.configuration import KimiK31Config
from kimigraph.models.kimi_k31.moe import LatentMoE

moe_experts = OPERATORS["moe_experts"].reference


def config_of(**fields):
    wanted = {
        "hidden_size": 44, "num_experts": 7, "num_experts_per_token": 3, "moe_intermediate_size": 10,
        "routed_expert_hidden_size": 18, "num_shared_experts": 2, "routed_scaling_factor": 1.7,
    }  # fmt: skip
    layers = {"full_attn_layers": [], "kda_layers": [1], "num_heads": 2, "head_dim": 8}
    required = {"vocab_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "q_lora_rank": 8, "kv_lora_rank": 8}
    required |= {"qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "linear_attn_config": layers}
    required |= {"intermediate_size": 16, "index_n_heads": 2, "index_head_dim": 8, "index_topk": 4}
    required |= {"attn_res_block_size": 2, "max_position_embeddings": 64, "model_type": "kimi_k31"}
    return KimiK31Config.from_dict({**required, **wanted, **fields, "dtype": "float32"})


def by_operator(moe, config, x):
    """The block as the operator has it, from the module's own weights."""
    shared, experts, norm = moe.shared_experts, moe.experts, moe.routed_expert_norm
    hidden = [None] * 3
    if shared is not None:
        hidden = [shared.gate_proj(x), shared.up_proj(x), shared.down_proj.weight]
    return moe_experts(
        moe.routed_expert_down_proj(x),
        linear(x, moe.gate.weight),
        moe.gate.e_score_correction_bias,
        experts.gate_up_proj,
        experts.down_proj,
        None if norm is None else norm.weight,
        moe.routed_expert_up_proj.weight,
        *hidden,
        picks=config.num_experts_per_token,
        renormalize=config.moe_renormalize,
        scale=config.routed_scaling_factor,
        activation="situ",
        beta=config.activation_situ_beta,
        linear_beta=config.activation_situ_linear_beta,
        eps=config.rms_norm_eps,
    )


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("tokens", [1, 2, 11])
@pytest.mark.parametrize(
    "fields", [{}, {"moe_renormalize": False, "num_shared_experts": 0}, {"latent_moe_use_norm": False}]
)
def test_it_computes_what_the_models_block_does(seed, tokens, fields):
    config = config_of(**fields)
    moe = initialize(LatentMoE(config).requires_grad_(False), seed=seed)
    x = torch.randn(tokens, 44, generator=torch.Generator().manual_seed(seed))
    out, chosen = by_operator(moe, config, x)
    torch.testing.assert_close(out, moe(x), rtol=1e-5, atol=1e-5)
    assert chosen.sort(1).values.tolist() == moe.gate(x)[0].sort(1).values.tolist()


def operands(tokens=3, experts=6, width=8, inner=4):
    generator = torch.Generator().manual_seed(0)

    def normal(*sizes):
        return torch.randn(*sizes, generator=generator)

    return SimpleNamespace(
        x=normal(tokens, width),
        logits=normal(tokens, experts),
        gate_up=normal(experts, 2 * inner, width),
        down=normal(experts, width, inner),
    )


def run(o, bias=None, **attributes):
    chosen = {"picks": 2, "renormalize": True} | attributes
    return moe_experts(o.x, o.logits, bias, o.gate_up, o.down, **chosen)


def test_ties_go_to_the_smaller_expert_and_nan_comes_last():
    o = operands(tokens=4)
    o.logits[0] = 0.5
    o.logits[1] = torch.tensor([0.0, 2.0, 1.0, 2.0, 1.0, 2.0])
    o.logits[2] = torch.tensor([float("nan"), -9.0, float("nan"), -8.0, float("-inf"), -7.0])
    o.logits[3] = float("inf")
    assert run(o, picks=3)[1].tolist() == [[0, 1, 2], [1, 3, 5], [5, 3, 1], [0, 1, 2]]


def test_the_bias_chooses_and_does_not_weigh():
    o = operands(tokens=1)
    bias = torch.zeros(6)
    bias[4] = 10.0
    out, chosen = run(o, bias, picks=1, renormalize=False)
    assert chosen.tolist() == [[4]]
    gate, up = (o.gate_up[4] @ o.x[0]).chunk(2)
    wanted = o.logits[0, 4].sigmoid() * (o.down[4] @ (torch.nn.functional.silu(gate) * up))
    torch.testing.assert_close(out[0], wanted)


def test_all_tokens_to_one_expert_and_none_to_others():
    o = operands(tokens=5)
    o.logits[:] = -5.0
    o.logits[:, 2] = 5.0
    o.gate_up[[0, 1, 3, 4, 5]] = float("nan")  # never read
    out, chosen = run(o, picks=1)
    assert chosen.unique().tolist() == [2] and out.isfinite().all()


def test_groups_are_chosen_by_their_two_best():
    """Groups (0, 1), (2, 3), (4, 5): the best expert of all is in a group whose second is bad."""
    o = operands(tokens=1)
    o.logits[0] = torch.tensor([9.0, -9.0, 1.0, 1.0, 0.9, 0.9])
    assert run(o, groups=3, group_picks=2)[1].tolist() == [[2, 3]]
    assert run(o, groups=3, group_picks=3)[1].tolist() == [[0, 2]]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"picks": 7}, "picks is 7, want 1 to 6"),
        ({"groups": 4}, "6 experts do not make 4 groups"),
        ({"groups": 2, "group_picks": 3}, "group_picks is 3, want 1 to 2"),
        ({"activation": "gelu"}, "activation 'gelu', want one of swiglu, situ"),
    ],
)
def test_what_does_not_fit_is_refused(change, complaint):
    o = operands()
    attributes = {"picks": 2, "renormalize": True} | change
    with pytest.raises(ValueError, match=complaint):
        OPERATORS["moe_experts"].fake(o.x, o.logits, None, o.gate_up, o.down, **attributes)


def test_operands_that_belong_together_come_together():
    o, fake = operands(), OPERATORS["moe_experts"].fake
    common = {"picks": 2, "renormalize": True}
    with pytest.raises(ValueError, match="norm_weight goes with up"):
        fake(o.x, o.logits, None, o.gate_up, o.down, torch.ones(8), **common)
    with pytest.raises(ValueError, match="give shared_gate, shared_up and shared_down together"):
        fake(o.x, o.logits, None, o.gate_up, o.down, shared_gate=torch.ones(3, 5), **common)


def test_the_cost_counts_the_experts_that_are_read():
    """One token reads 2 of 6 experts; very many read all."""
    few, many = operands(tokens=1), operands(tokens=100)
    weights = (few.gate_up.numel() + few.down.numel()) * 4
    cost = OPERATORS["moe_experts"].cost
    for o, read in ((few, 2 * weights // 6), (many, weights)):
        found = cost(o.x, o.logits, None, o.gate_up, o.down, picks=2, renormalize=True).bytes
        assert found == read + 2 * o.x.numel() * 4 + o.logits.numel() * 4 + 4 * 2 * o.x.shape[0]
