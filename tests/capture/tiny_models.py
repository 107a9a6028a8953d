"""Tiny configurations of public models, with enough index heads that scores do not tie."""

import json
from pathlib import Path
from typing import Any

_COMMON: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "n_shared_experts": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "kv_lora_rank": 24,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "v_head_dim": 10,
    "max_position_embeddings": 256,
    "mlp_layer_types": ["dense", "sparse"],
    "index_topk": 8,
    "index_head_dim": 16,
    "index_n_heads": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

DEEPSEEK: dict[str, Any] = {**_COMMON, "model_type": "deepseek_v32", "qk_rope_head_dim": 8}

GLM_TEXT: dict[str, Any] = {
    **_COMMON,
    "model_type": "glm5_next_text",
    "qk_rope_head_dim": 0,
    "layer_types": ["linear_attention", "indexed_attention"],
    "indexer_types": ["full", "full"],
    "index_kpool": 4,
    "linear_head_dim": 8,
    "linear_num_heads": 3,
    "hc_mult": 2,
    "hc_sinkhorn_iters": 2,
}

GLM: dict[str, Any] = {"model_type": "glm5_next", "text_config": GLM_TEXT}

KIMI: dict[str, Any] = {
    "model_type": "kimi_k31",
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "q_lora_rank": 20,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "linear_attn_config": {"full_attn_layers": [2], "kda_layers": [1], "num_heads": 3, "head_dim": 8},
    "index_n_heads": 32,
    "index_head_dim": 16,
    "index_topk": 8,
    "attn_res_block_size": 2,
    "intermediate_size": 48,
    "num_experts": 4,
    "num_experts_per_token": 2,
    "moe_intermediate_size": 16,
    "routed_expert_hidden_size": 16,
    "max_position_embeddings": 256,
}


def write_model(directory: Path, document: dict[str, Any], seed: int | None = 0) -> str:
    """Write ``config.json`` into a new directory, with random weights unless ``seed`` is None; returns the path."""
    directory.mkdir(parents=True, exist_ok=True)
    random = {} if seed is None else {"random_weights": {"seed": seed}}
    (directory / "config.json").write_text(json.dumps({**document, **random}))
    return str(directory)
