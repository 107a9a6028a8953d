"""Configurations of tiny models whose heads, widths and vocabulary 1, 2, 3 and 4 ranks divide."""

from typing import Any

WIDTHS: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 96,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 12,
    "q_lora_rank": 20,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 8,
    "v_head_dim": 6,
    "index_topk": 8,
    "index_head_dim": 16,
    "index_n_heads": 32,
    "max_position_embeddings": 65536,
    "random_weights": {"seed": 0},
}
KIMI = {
    **WIDTHS,
    "model_type": "kimi_k31",
    "qk_rope_head_dim": 4,
    "linear_attn_config": {"full_attn_layers": [2], "kda_layers": [1], "num_heads": 12, "head_dim": 4},
    "attn_res_block_size": 2,
    "num_experts": 4,
    "num_experts_per_token": 2,
    "routed_expert_hidden_size": 16,
}
PUBLIC = {
    **WIDTHS,
    "num_key_value_heads": 12,
    "n_shared_experts": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "mlp_layer_types": ["dense", "sparse"],
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
DEEPSEEK = {**PUBLIC, "model_type": "deepseek_v32", "qk_rope_head_dim": 4}
GLM: dict[str, Any] = {
    "model_type": "glm5_next",
    "random_weights": {"seed": 0},
    "text_config": {
        **PUBLIC,
        "model_type": "glm5_next_text",
        "qk_rope_head_dim": 0,
        "layer_types": ["linear_attention", "indexed_attention"],
        "indexer_types": ["full", "full"],
        "index_kpool": 4,
        "linear_head_dim": 4,
        "linear_num_heads": 12,
        "hc_mult": 2,
        "hc_sinkhorn_iters": 2,
    },
}
