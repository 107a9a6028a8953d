"""Decode steps of a model by transformers alone, in a process of its own; nothing of this project may be imported here.

``python transformers_steps.py CONFIG.json DIRECTORY STEPS BATCH CONTEXT`` makes a model of CONFIG with random weights,
saves it to DIRECTORY as a checkpoint, decodes STEPS random tokens for BATCH sequences from an empty static cache of
CONTEXT places, and writes DIRECTORY/steps.safetensors: ``<step>.input_ids``, ``<step>.logits`` and every cache tensor
as ``<step>.<name>``.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, StaticCache
from transformers.models.deepseek_v32 import DeepseekV32ForCausalLM
from transformers.models.glm5_next.modeling_glm5_next import Glm5NextForConditionalGeneration

MODELS = {"deepseek_v32": DeepseekV32ForCausalLM, "glm5_next": Glm5NextForConditionalGeneration}
ROLES = {
    "keys": "cache.{}.latent",
    "values": "cache.{}.rope",
    "indexer_keys": "cache.{}.index_key",
    "cumulative_length": "cache.{}.length",
    "indexer_cumulative_length": "cache.{}.index_length",
    "conv_states": "state.{}.conv",
    "recurrent_states": "state.{}.kda",
}


def make_model(document: dict[str, Any]) -> Any:
    fields = {key: value for key, value in document.items() if key != "model_type"}
    config = AutoConfig.for_model(document["model_type"], **fields)
    for part in (config, config.get_text_config(decoder=True)):
        part._attn_implementation = "sdpa"
        part._experts_implementation = "batched_mm"
    model = MODELS[document["model_type"]](config).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(11)
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point():
            noise = torch.randn(tensor.shape, generator=generator)
            scaled = noise * tensor.shape[-1] ** -0.5 if tensor.dim() > 1 else 0.1 * noise
            tensor.copy_(1 + scaled if tensor.dim() == 1 and "norm" in name and "bias" not in name else scaled)
    return model


def cache_values(cache: Any, pooled: bool) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for index, layer in enumerate(cache.layers):
        for attribute, name in ROLES.items():
            value = getattr(layer, attribute, None)
            value = value[0] if isinstance(value, dict) and value else value
            if isinstance(value, torch.Tensor) and value.numel():
                packed = pooled and attribute == "indexer_keys"  # key, gate score and valid flag in one row
                found[(name if not packed else "cache.{}.index_packed").format(index)] = value.clone()
    return found


@torch.no_grad()
def main(config: str, directory: str, steps: int, batch: int, context: int) -> None:
    model = make_model(json.loads(Path(config).read_text()))
    text = model.config.get_text_config(decoder=True)
    model.save_pretrained(directory)
    cache = StaticCache(config=text, max_cache_len=context)
    tokens = torch.randint(0, text.vocab_size, (steps, batch, 1), generator=torch.Generator().manual_seed(7))
    saved: dict[str, torch.Tensor] = {}
    for step, ids in enumerate(tokens):
        logits = model(input_ids=ids, past_key_values=cache, use_cache=True).logits
        values = {"input_ids": ids, "logits": logits, **cache_values(cache, hasattr(text, "index_kpool"))}
        saved |= {f"{step}.{name}": value.contiguous().clone() for name, value in values.items()}
    assert not [name for name in sys.modules if name.startswith("kimigraph")]
    save_file(saved, Path(directory) / "steps.safetensors")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:]))
