"""Tiny and mid-size models of each family: all structures present; in tiny ones no two dims share a width, and
mid-size ones have the head widths of the published models, which the kernels are made for."""

from typing import Any

_TOKENS: dict[str, Any] = {"vocab_size": 97, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_WIDTHS: dict[str, Any] = {
    **_TOKENS,
    "hidden_size": 40,
    "intermediate_size": 56,
    "moe_intermediate_size": 24,
    "num_attention_heads": 2,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
}
_INDEXED: dict[str, Any] = {
    **_WIDTHS,
    "num_key_value_heads": 2,
    "q_lora_rank": 20,
    "n_shared_experts": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "max_position_embeddings": 256,
    "index_topk": 5,
    "index_head_dim": 16,
    "index_n_heads": 32,
}
_LINEAR = {"head_dim": 8, "num_heads": 3, "short_conv_kernel_size": 4, "full_attn_layers": [4], "kda_layers": [1, 2, 3]}
_KIMI: dict[str, Any] = {
    **_WIDTHS,
    "num_hidden_layers": 4,
    "q_lora_rank": 20,
    "linear_attn_config": {**_LINEAR, "gate_lower_bound": -5.0},
    "attn_res_block_size": 2,
    "num_experts": 4,
    "num_experts_per_token": 2,
    "routed_expert_hidden_size": 32,
    "max_position_embeddings": 256,
}
_VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 40}

MODELS: dict[str, dict[str, Any]] = {
    "kimi_k3": {**_KIMI, "model_type": "kimi_k3"},
    "kimi_k31": {
        **_KIMI,
        "model_type": "kimi_k31",
        "index_n_heads": 32,
        "index_head_dim": 16,
        "index_topk": 5,
    },
    "kimi_linear": {
        **_WIDTHS,
        "model_type": "kimi_linear",
        "num_key_value_heads": 2,
        "num_hidden_layers": 4,
        "num_experts": 4,
        "num_experts_per_token": 2,
        "num_shared_experts": 1,
        "model_max_length": 256,
        "linear_attn_config": _LINEAR,
    },
    "deepseek_v32": {
        **_INDEXED,
        "model_type": "deepseek_v32",
        "num_hidden_layers": 2,
        "mlp_layer_types": ["dense", "sparse"],
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "beta_fast": 32,
            "beta_slow": 1,
        },
    },
    "glm_moe_dsa": {
        **_INDEXED,
        "model_type": "glm_moe_dsa",
        "num_hidden_layers": 3,
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "indexer_types": ["full", "shared", "full"],
    },
    "glm5_next": {
        "model_type": "glm5_next",
        "text_config": {
            **_INDEXED,
            "model_type": "glm5_next_text",
            "num_hidden_layers": 2,
            "qk_rope_head_dim": 0,
            "mlp_layer_types": ["dense", "sparse"],
            "layer_types": ["linear_attention", "indexed_attention"],
            "indexer_types": ["full", "full"],
            "index_kpool": 4,
            "index_topk": 8,
            "linear_head_dim": 8,
            "linear_num_heads": 3,
            "hc_mult": 2,
            "hc_sinkhorn_iters": 2,
        },
        "vision_config": {**_VISION, "projection_intermediate_size": 16},
    },
}
"""Configurations by model type: shared index layers, YaRN, pooled index keys and hyper-connections are among them."""

_HEADS: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "moe_intermediate_size": 256,
    "num_attention_heads": 8,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
_INDEXED_HEADS: dict[str, Any] = {
    **_HEADS,
    "num_key_value_heads": 8,
    "q_lora_rank": 256,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "index_topk": 32,
    "index_head_dim": 128,
}
_LINEAR_HEADS = {"head_dim": 128, "num_heads": 4}
_KIMI_HEADS: dict[str, Any] = {
    **_HEADS,
    "q_lora_rank": 256,
    "linear_attn_config": {**_LINEAR, **_LINEAR_HEADS, "gate_lower_bound": -5.0},
    "num_experts": 16,
    "num_experts_per_token": 4,
    "routed_expert_hidden_size": 256,
}

MID_SIZE: dict[str, dict[str, Any]] = {
    "kimi_k3": MODELS["kimi_k3"] | _KIMI_HEADS,
    "kimi_k31": MODELS["kimi_k31"] | _KIMI_HEADS | {"index_head_dim": 128, "index_topk": 32},
    "kimi_linear": MODELS["kimi_linear"]
    | _HEADS
    | {
        "num_key_value_heads": 8,
        "num_experts": 16,
        "num_experts_per_token": 4,
        "linear_attn_config": {**_LINEAR, **_LINEAR_HEADS},
    },
    "deepseek_v32": MODELS["deepseek_v32"] | _INDEXED_HEADS,
    "glm_moe_dsa": MODELS["glm_moe_dsa"] | _INDEXED_HEADS,
    "glm5_next": MODELS["glm5_next"]
    | {
        "text_config": MODELS["glm5_next"]["text_config"]
        | _INDEXED_HEADS
        | {
            "qk_rope_head_dim": 0,
            "qk_nope_head_dim": 256,
            "v_head_dim": 256,
            "index_kpool": 16,
            "index_topk": 64,
            "linear_head_dim": 128,
            "linear_num_heads": 4,
            "hc_mult": 4,
        },
        "vision_config": {**_VISION, "projection_intermediate_size": 16, "out_hidden_size": 512},
    },
}
"""The same models at widths that kernels for the GPU are made for."""

SIZES = {"tiny": MODELS, "mid": MID_SIZE}
