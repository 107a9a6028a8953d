"""A tiny model of transformers as it generates by itself; nothing of this project may be imported here.

``python fidelity_reference.py CONFIG.json DIRECTORY SEED PROMPT STEPS CONTEXT`` makes a model of CONFIG with random
weights, saves it to DIRECTORY with ``save_pretrained``, reads a prompt of PROMPT random tokens in one step, adds STEPS
greedy ones, and writes DIRECTORY/reference.safetensors: ``prompt``, ``tokens``, ``logits`` [PROMPT + STEPS - 1, V] of
every position, and each tensor of its static cache at the end.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor

CLASSES = {
    "deepseek_v32": "DeepseekV32ForCausalLM",
    "glm_moe_dsa": "GlmMoeDsaForCausalLM",
    "glm5_next": "Glm5NextForConditionalGeneration",
    "kimi_linear": "KimiLinearForCausalLM",
}
ROLES = {
    "keys": "cache.{}.latent",
    "values": "cache.{}.rope",
    "indexer_keys": "cache.{}.index_key",
    "conv_states": "state.{}.conv",
    "recurrent_states": "state.{}.kda",
}


def make_model(document: dict[str, Any], seed: int) -> Any:
    """The model with random weights; none stays at the value that transformers gives it, so that no scores tie."""
    fields = {key: value for key, value in document.items() if key != "model_type"}
    config: Any = transformers.AutoConfig.for_model(document["model_type"], **fields)
    for part in (config, config.get_text_config(decoder=True)):
        part._attn_implementation = "sdpa"
        part._experts_implementation = "batched_mm"
    model = getattr(transformers, CLASSES[document["model_type"]])(config).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point():
            noise = torch.randn(tensor.shape, generator=generator)
            scaled = noise * tensor.shape[-1] ** -0.5 if tensor.dim() > 1 else 0.1 * noise
            tensor.copy_(1 + scaled if tensor.dim() == 1 and "norm" in name and "bias" not in name else scaled)
    return model


def cache_values(cache: Any, pooled: bool) -> dict[str, Tensor]:
    """The cache's tensors by flat name, single heads without their dim."""
    found: dict[str, Tensor] = {}
    for index, layer in enumerate(cache.layers):
        for attribute, template in ROLES.items():
            value: Any = getattr(layer, attribute, None)
            value = value[0] if isinstance(value, dict) and value else value
            if isinstance(value, Tensor) and value.numel():
                name = "cache.{}.index_packed" if pooled and attribute == "indexer_keys" else template
                found[name.format(index)] = value[:, 0] if attribute in ("keys", "values") else value
    return found


@torch.no_grad()
def main(config: str, directory: str, seed: int, prompt: int, steps: int, context: int) -> None:
    """Generate and write; see the module."""
    torch.set_num_threads(1)
    model = make_model(json.loads(Path(config).read_text()), seed)
    model.save_pretrained(directory)
    text = model.config.get_text_config(decoder=True)
    cache = transformers.StaticCache(config=text, max_cache_len=context)
    ids = torch.randint(3, text.vocab_size, (1, prompt), generator=torch.Generator().manual_seed(seed))
    logits, tokens, given = [], [], ids
    for _ in range(steps):
        logits.append(model(input_ids=given, cache=cache, use_cache=True).logits[0])
        given = logits[-1][-1:].argmax(-1, keepdim=True)
        tokens.append(given.item())
    assert not [name for name in sys.modules if name.startswith("kimigraph")]
    caches = {name: value.clone() for name, value in cache_values(cache, hasattr(text, "index_kpool")).items()}
    saved = {"prompt": ids[0], "tokens": torch.tensor(tokens), "logits": torch.cat(logits), **caches}
    save_file(
        {name: value.contiguous().clone() for name, value in saved.items()}, Path(directory) / "reference.safetensors"
    )


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:]))
