# pyright: basic
# Reason: transformers builds its models from untyped configuration objects.
"""Models of transformers as one step: ``forward(input_ids, cache) -> logits`` with a flat dict of cache tensors."""

import logging
import re
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kimigraph.adapters.transformers_cache import CacheBuilder, CacheTensor, cache_tensors, static_cache
from kimigraph.ir.errors import UsageError

MODEL_TYPES = ("deepseek_v32", "glm5_next", "glm5_next_text", "glm_moe_dsa", "kimi_linear")
"""Model types of transformers that capture knows."""

PREFIX = "model."
"""What ``TransformersStep`` adds to the front of the model's own parameter names."""


@dataclass(frozen=True)
class Implementations:
    """Which of transformers' own spellings of attention and experts a model uses.

    ``batched_mm`` gathers the weights of the picked experts: it exports at any dtype to plain ATen. ``grouped_mm``
    exports to an operator of transformers' own unless everything is bfloat16.
    """

    attention: str = "sdpa"
    experts: str = "batched_mm"


class TransformersStep(nn.Module):
    """A causal language model with its caches handed over as a flat dict and updated in place.

    ``forward(input_ids, cache)``: ``input_ids`` int64 [B, S]; ``cache`` maps the names of ``cache_tensors`` to tensors.
    Returns logits [B, S, vocabulary], or hidden states when the model has no head.
    """

    def __init__(self, model: nn.Module, cache: Any, tensors: tuple[CacheTensor, ...]) -> None:
        super().__init__()
        self.model = model
        self._builder = CacheBuilder(cache, tensors)

    def forward(self, input_ids: Tensor, cache: dict[str, Tensor]) -> Tensor:
        """One step; see the class."""
        rebuilt = self._builder.build(cache)
        model: Any = self.model
        if hasattr(model, "lm_head") and hasattr(model.model, "language_model"):
            hidden = model.model.language_model(input_ids=input_ids, cache=rebuilt, use_cache=True).last_hidden_state
            return model.lm_head(hidden)
        result = model(input_ids=input_ids, cache=rebuilt, use_cache=True)
        return result.logits if hasattr(result, "logits") else result.last_hidden_state


def require_transformers(model_type: str) -> None:
    """UsageError, with the remedy, unless an installed transformers has that model type."""
    try:
        from transformers import AutoConfig
    except ImportError as error:
        raise UsageError(
            f"model_type {model_type!r} needs transformers, which is not installed: pip install 'kimigraph[hf]'"
        ) from error
    try:
        AutoConfig.for_model(model_type)
    except ValueError as error:
        from transformers import __version__

        raise UsageError(
            f"transformers {__version__} has no model_type {model_type!r}: pip install -U 'kimigraph[hf]'"
        ) from error
    # Its advice to install kernels for eager runs would stand between the lines of a compilation.
    logging.getLogger("transformers.integrations.hub_kernels").setLevel(logging.ERROR)


def read_config(document: dict[str, Any], place: str) -> Any:
    """transformers' configuration object of a ``config.json``; UsageError with its complaint when it is refused."""
    from transformers import AutoConfig

    fields = {key: value for key, value in document.items() if key not in ("model_type", "random_weights")}
    try:
        return AutoConfig.for_model(document["model_type"], **fields)
    except Exception as error:  # transformers raises its own validation errors beside ValueError and TypeError
        raise UsageError(f"transformers refuses {place}: {' '.join(str(error).split())}") from error


def text_config(config: Any) -> Any:
    """The text part of a multimodal configuration, or the configuration itself."""
    return config.get_text_config(decoder=True)


def set_implementations(config: Any, chosen: Implementations) -> None:
    """Make ``config`` and its text part use the chosen attention and experts."""
    for part in {id(part): part for part in (config, text_config(config))}.values():
        part._attn_implementation = chosen.attention
        part._experts_implementation = chosen.experts


def empty_model(config: Any, dtype: torch.dtype, device: str) -> nn.Module:
    """The model with uninitialised parameters of its own dtypes; no vision tower."""
    from transformers.initialization import no_init_weights

    with no_init_weights():
        model = build_model(config, device)
    model.eval().requires_grad_(False)
    set_dtypes(model, dtype)
    return model


def build_model(config: Any, device: str) -> nn.Module:
    """The model in the types of its classes; the caller sees to initialisation."""
    if config.model_type != "glm5_next":
        with torch.device(device):
            model = _model_class(config)(config)
        if config.tie_word_embeddings and hasattr(model, "lm_head"):
            model.lm_head.weight = model.model.embed_tokens.weight
        return model
    text, model_class = text_config(config), _model_class(config)
    with torch.device("meta"):  # the vision tower is never materialised
        shell = model_class(config)
    with torch.device(device):
        shell.model.language_model = _model_class(text)(text)
        shell.lm_head = nn.Linear(text.hidden_size, text.vocab_size, bias=False)
    return _without_vision(shell)


def _without_vision(shell: Any) -> nn.Module:
    shell.model.visual = None
    if shell.config.tie_word_embeddings:
        shell.lm_head.weight = shell.model.language_model.embed_tokens.weight
    return shell


_CAUSAL = {
    "deepseek_v32": "DeepseekV32ForCausalLM",
    "glm_moe_dsa": "GlmMoeDsaForCausalLM",
    "kimi_linear": "KimiLinearForCausalLM",
}


def _model_class(config: Any) -> Any:
    if config.model_type in _CAUSAL:
        import transformers

        return getattr(transformers, _CAUSAL[config.model_type])
    from transformers.models.glm5_next import modeling_glm5_next as glm

    return glm.Glm5NextTextModel if config.model_type == "glm5_next_text" else glm.Glm5NextForConditionalGeneration


def modelling_of(config: Any) -> Any:
    """The module that defines the model's classes."""
    return sys.modules[_model_class(config).__module__]


def set_dtypes(model: nn.Module, dtype: torch.dtype) -> None:
    """Parameters in ``dtype``, except those that the model says must stay in fp32.

    They have no values yet, so none are converted: a model larger than the memory is laid out without touching it.
    """
    strict = [
        name for module in model.modules() for name in getattr(module, "_keep_in_fp32_modules_strict", None) or ()
    ]
    kept = re.compile("|".join(rf"(^|\.){re.escape(name)}(\.|$)" for name in sorted(set(strict))) or "$^")
    persistent = set(model.state_dict())
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name in persistent and tensor.is_floating_point():
            tensor.data = torch.empty_like(tensor, dtype=torch.float32 if kept.search(name) else dtype)


def new_cache(
    text: Any, batch: int, context: int, dtype: torch.dtype, has_state: bool
) -> tuple[Any, tuple[CacheTensor, ...]]:
    """A static cache of the text model on the meta device, and the tensors that a step takes in its place.

    ``has_state``: the step continues sequences (decode) instead of starting them.
    """
    cache = static_cache(text, batch, context, dtype, has_state)
    return cache, cache_tensors(cache)


def has_head(config: Any) -> bool:
    """Whether the model of ``config`` returns logits; a bare text model returns hidden states."""
    return config.model_type != "glm5_next_text"


def known_fields(model_type: str) -> set[str]:
    """The configuration fields of a model type, those of its text part included."""
    from transformers import AutoConfig

    kind = type(AutoConfig.for_model(model_type))
    kinds = [kind, *getattr(kind, "sub_configs", {}).values()]
    names = {
        name for each in kinds for name in dir(each) if not name.startswith("_") and not callable(getattr(each, name))
    }
    return names.union(*(getattr(each, "attribute_map", {}) for each in kinds))
