"""``torch.compile`` over transformers' ``generate`` with static caches: eager's tokens, and nothing compiled twice."""

from typing import Any

import pytest
import torch
from tiny_configs import MODELS as TINY
from torch._dynamo.utils import counters

from kimigraph import TorchBackend
from kimigraph.capture.weights import seed_weights

COMMON: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "kv_lora_rank": 24,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "max_position_embeddings": 256,
    "index_topk": 8,
    "index_head_dim": 16,
    "index_n_heads": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MODELS: dict[str, dict[str, Any]] = {
    "deepseek_v32": {**COMMON, "num_hidden_layers": 1, "mlp_layer_types": ["sparse"]},
    "kimi_linear": {
        **{key: value for key, value in COMMON.items() if not key.startswith(("index_", "q_lora"))},
        "num_hidden_layers": 2,
        "num_experts": 4,
        "linear_num_heads": 3,
        "linear_head_dim": 8,
        "layer_types": ["linear_attention", "full_attention"],
        "mlp_layer_types": ["dense", "sparse"],
    },
    "glm_moe_dsa": {**COMMON, "num_hidden_layers": 2, "mlp_layer_types": ["dense", "sparse"]},
}


def tiny(model_type: str) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    if model_type == "glm5_next":
        model = glm5_next()
    else:
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **MODELS[model_type])).eval()
    seed_weights(model, 0)
    model.generation_config.eos_token_id = None
    return model


def glm5_next() -> Any:
    """The multimodal model, which alone has a head: it is given text, and its vision part is as small as can be."""
    from transformers import Glm5NextConfig, Glm5NextForConditionalGeneration

    text = {key: value for key, value in TINY["glm5_next"]["text_config"].items() if key != "random_weights"}
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
    config = Glm5NextConfig(text_config={**text, "max_position_embeddings": 256}, vision_config=vision)
    return Glm5NextForConditionalGeneration(config).eval()


FUSED = {
    "kimi_linear": {"raise-kda 1"},
    "glm5_next": {"raise-kda 1", "fuse-lightning-indexer", "fuse-sparse-attention"},
}


@pytest.mark.parametrize(
    "model_type",
    [
        "deepseek_v32",
        pytest.param("glm_moe_dsa", marks=pytest.mark.slow),
        pytest.param("kimi_linear", marks=pytest.mark.slow),  # its prompts unroll into a thousand nodes
        pytest.param("glm5_next", marks=pytest.mark.slow),
    ],
)
@torch.no_grad()
# glm5_next keeps those of its pooled keys that are full: how many they are is a value of the run.
@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_generate_gives_the_tokens_of_eager_and_recompiles_nothing_after_the_first_call(model_type: str) -> None:
    torch._dynamo.reset()
    counters.clear()
    model, ids = tiny(model_type), torch.arange(3, 15).reshape(1, 12)
    options: dict[str, Any] = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 0}
    options |= {"cache_implementation": "static", "disable_compile": True}
    want = model.generate(ids, **options)
    backend = TorchBackend()
    model.forward = torch.compile(model.forward, backend=backend)
    assert model.generate(ids, **options).tolist() == want.tolist()
    graphs = counters["stats"]["unique_graphs"]
    programs = sum(len(graph.programs) for graph in backend.graphs)
    assert model.generate(ids, **options).tolist() == want.tolist()
    assert counters["stats"]["unique_graphs"] == graphs == programs == 2  # the prompt and one token
    assert not counters["graph_break"]
    assert all(report.target == "cpu:reference" for report in backend.report())
    fused = FUSED.get(model_type, {"fuse-lightning-indexer", "fuse-sparse-attention"})
    assert all(rule in backend.explain().splitlines()[2] for rule in fused), backend.explain()
