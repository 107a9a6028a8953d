"""Kimi K3: the skeleton without an indexer, and the configuration as published."""

from typing import Any

import pytest
import torch

from kimigraph.ir.errors import UsageError
from kimigraph.models.kimi_k3 import KimiK3Config, KimiK3ForCausalLM, initialize, new_cache
from kimigraph.models.kimi_k31 import KimiK31Config, KimiK31ForCausalLM

LATENT = [*range(4, 93, 4), 93]
PUBLISHED: dict[str, Any] = {
    "architectures": ["KimiK3ForConditionalGeneration"],
    "model_type": "kimi_k3",
    "dtype": "bfloat16",
    "eos_token_id": 163586,
    "tie_word_embeddings": False,
    "text_config": {
        "_name_or_path": "",
        "activation_situ_beta": 4.0,
        "activation_situ_linear_beta": 25.0,
        "attn_res_block_size": 12,
        "dtype": "bfloat16",
        "first_k_dense_replace": 1,
        "hidden_act": "situ",
        "hidden_size": 7168,
        "intermediate_size": 33792,
        "kv_lora_rank": 512,
        "latent_moe_use_norm": True,
        "linear_attn_config": {
            "full_attn_layers": LATENT,
            "kda_layers": [layer for layer in range(1, 94) if layer not in LATENT],
            "gate_lower_bound": -5.0,
            "head_dim": 128,
            "num_heads": 96,
            "short_conv_kernel_size": 4,
            "use_full_rank_gate": True,
        },
        "max_length": 20,
        "mla_use_nope": True,
        "mla_use_output_gate": True,
        "model_type": "kimi_linear",
        "moe_intermediate_size": 3072,
        "moe_layer_freq": 1,
        "moe_renormalize": True,
        "num_attention_heads": 96,
        "num_expert_group": 1,
        "num_experts": 896,
        "num_experts_per_token": 16,
        "num_hidden_layers": 93,
        "num_key_value_heads": 96,
        "num_nextn_predict_layers": 0,
        "num_shared_experts": 2,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "quantization_config": {"format": "mxfp4-pack-quantized"},
        "routed_expert_hidden_size": 3584,
        "rope_theta": 10000.0,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "use_grouped_topk": True,
        "v_head_dim": 128,
        "vocab_size": 163840,
    },
    "vision_config": {"patch_size": 14},
}


def test_the_published_model_has_its_published_size() -> None:
    config = KimiK3Config.from_dict(PUBLISHED)
    model = KimiK3ForCausalLM(config, device="meta")
    assert len(config.latent_layers) == 24 and config.latent_layers[-2:] == (91, 92)
    experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name and "shared" not in name)
    assert experts == 92 * 896 * 3 * 3072 * 3584
    # 2.78 T in all; of the 1.5036e12 stored values, experts have two numbers a byte and a scale for each 32
    total = sum(parameter.numel() for parameter in model.parameters())
    stored = total - experts + experts // 2 + experts // 32
    assert abs(stored - 1_503_647_073_024) < 5e8  # the rest: the vision tower, and A_log with its padding
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}


def test_overrides_reach_the_text_part() -> None:
    config = KimiK3Config.from_dict(PUBLISHED, [("num_hidden_layers", "4"), ("dtype", "float32")])
    assert (config.num_hidden_layers, config.torch_dtype, config.latent_layers) == (4, torch.float32, (3,))
    assert set(new_cache(config, 1, 16, device="meta")) == {
        *(f"state.{layer}.{part}" for layer in range(3) for part in ("kda", "conv")),
        "cache.3.latent",
        "cache.3.rope",
    }


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("index_topk", "8", "kimi_k3 has no field 'index_topk'"),
        ("num_key_value_heads", "8", "num_key_value_heads is 8 and num_attention_heads 96"),
        ("moe_layer_freq", "2", "moe_layer_freq is 2; supported: 1"),
        ("linear_attn_config.use_full_rank_gate", "false", "use_full_rank_gate is False; supported: True"),
    ],
)
def test_a_field_that_does_not_fit_is_named(field: str, value: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        KimiK3Config.from_dict(PUBLISHED, [(field, value)])
    assert message in str(caught.value)


def tiny_k3(tiny: dict[str, Any], **fields: Any) -> KimiK3Config:
    kept = {name: value for name, value in tiny.items() if not name.startswith("index_")}
    return KimiK3Config.from_dict(kept | {"model_type": "kimi_k3"} | fields)


@pytest.mark.parametrize("sizes", [[1] * 20, [9, 1, 10]])
def test_it_is_k31_whose_indexer_picks_everything(tiny: dict[str, Any], sizes: list[int]) -> None:
    """The two models share all but the indexer; one that picks every token leaves dense attention."""
    sparse = KimiK31ForCausalLM(KimiK31Config.from_dict(tiny | {"index_topk": 24}), device="meta")
    initialize(sparse)
    dense = KimiK3ForCausalLM(tiny_k3(tiny))
    shared = {name: value for name, value in sparse.state_dict().items() if ".indexer." not in name}
    dense.load_state_dict(shared, strict=True)
    ids, at = torch.randint(0, 256, (2, sum(sizes))), 0
    caches = [new_cache(model.config, 2, 24) for model in (sparse, dense)]
    for size in sizes:
        lengths = torch.full((2,), at, dtype=torch.int32)
        want, got = (
            model(ids[:, at : at + size], lengths, cache) for model, cache in zip((sparse, dense), caches, strict=True)
        )
        assert torch.equal(want, got)
        at += size
    for name, tensor in caches[1].items():
        assert torch.equal(tensor, caches[0][name])


def test_a_model_for_generation_gives_the_last_logits_alone(tiny: dict[str, Any]) -> None:
    config = tiny_k3(tiny, num_hidden_layers=4)
    whole, last = KimiK3ForCausalLM(config, "meta"), KimiK3ForCausalLM(config, last_only=True)
    initialize(whole)
    last.load_state_dict(whole.state_dict())
    ids, lengths = torch.randint(0, 256, (2, 9)), torch.zeros(2, dtype=torch.int32)
    want, got = whole(ids, lengths, new_cache(config, 2, 16)), last(ids, lengths, new_cache(config, 2, 16))
    assert got.shape == (2, 1, 256)
    torch.testing.assert_close(got, want[:, -1:], rtol=1e-5, atol=1e-6)
