"""Configurations of all model types, tiny."""

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
COMMON: dict[str, Any] = {
    "random_weights": {"seed": 0},
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
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "max_position_embeddings": 64,
    "mlp_layer_types": ["dense", "sparse"],
    "index_topk": 8,
    "index_head_dim": 16,
    "index_n_heads": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
HYBRID = {"linear_head_dim": 8, "linear_num_heads": 3}
K31 = json.loads((ROOT / "examples" / "k31_tiny" / "config.json").read_text()) | {"num_hidden_layers": 4}
MODELS: dict[str, dict[str, Any]] = {
    "kimi_k31": K31,
    "kimi_k3": {key: value for key, value in K31.items() if not key.startswith("index_")},
    "deepseek_v32": COMMON,
    "glm_moe_dsa": COMMON,
    "kimi_linear": {**COMMON, **HYBRID, "num_experts": 4, "layer_types": ["linear_attention", "full_attention"]},
    "glm5_next": {
        **COMMON,
        "text_config": {
            **COMMON,
            **HYBRID,
            "model_type": "glm5_next_text",
            "qk_rope_head_dim": 0,
            "layer_types": ["linear_attention", "indexed_attention"],
            "indexer_types": ["full", "full"],
            "index_kpool": 4,
            "hc_mult": 2,
            "hc_sinkhorn_iters": 2,
        },
    },
}


def write_config(directory: Path, model_type: str, **fields: Any) -> str:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({**MODELS[model_type], **fields, "model_type": model_type}))
    return str(directory)
