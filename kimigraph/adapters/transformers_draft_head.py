# pyright: basic
# Reason: transformers builds its models from untyped configuration objects.
"""The multi-token-prediction layer that a checkpoint has behind its last one, of transformers' own decoder layer.

transformers leaves these weights out. Source: the DeepSeek-V3 technical report (2.2) and the notes on its weight files:
layer ``num_hidden_layers`` is a decoder layer with ``enorm``, ``hnorm``, ``eh_proj`` and ``shared_head.norm`` beside
it, and shares embedding and output head with the model.
"""

import copy
from typing import Any

import torch
from torch import nn

from kimigraph.adapters.transformers_models import build_model, modelling_of, set_dtypes
from kimigraph.ir.errors import UsageError

MODEL_TYPES = ("deepseek_v32", "glm_moe_dsa")
"""Model types whose published layer is of that form."""
_LISTS = {"layer_types": "indexed_attention", "mlp_layer_types": "sparse", "indexer_types": "full"}
"""Fields with an entry a layer, and what the further layer has there."""


def require_head(config: Any, place: str) -> None:
    """UsageError, with the remedy, for a model without such a layer."""
    layers = getattr(config, "num_nextn_predict_layers", None) or 0
    if config.model_type not in MODEL_TYPES:
        raise UsageError(
            f"{place}: the draft mtp is for {' and '.join(MODEL_TYPES)}, not for {config.model_type}: use ngram or a "
            "smaller model"
        )
    if layers < 1:
        raise UsageError(
            f"{place}: num_nextn_predict_layers is {layers}, so the checkpoint has no layer for the draft mtp: use "
            "ngram or a smaller model"
        )


def head_config(config: Any) -> Any:
    """The configuration with the further layer counted."""
    extended = copy.deepcopy(config)
    layers = config.num_hidden_layers
    for name, kind in _LISTS.items():
        given = getattr(extended, name, None)
        if given is not None:
            setattr(extended, name, [*given[:layers], kind])
    extended.num_hidden_layers = layers + 1
    return extended


def empty_head(config: Any, dtype: torch.dtype, device: str) -> nn.Module:
    """Embedding, rotary embedding, the further layer alone and the output head, uninitialised, by published names."""
    from transformers.initialization import no_init_weights

    shell, extended = copy.deepcopy(config), head_config(config)
    shell.num_hidden_layers = 0
    with no_init_weights():
        model: Any = build_model(shell, device)
        with torch.device(device):
            layer = _layer(extended, config.num_hidden_layers)
    model.model.layers = nn.ModuleDict({str(config.num_hidden_layers): layer})
    model.model.norm = nn.Identity()
    model.eval().requires_grad_(False)
    set_dtypes(model, dtype)
    return model


def _layer(extended: Any, number: int) -> nn.Module:
    modelling = modelling_of(extended)
    kind = next(value for name, value in vars(modelling).items() if name.endswith("DecoderLayer"))
    layer = kind(extended, number)
    hidden, norm = extended.hidden_size, type(layer.input_layernorm)
    layer.enorm, layer.hnorm = norm(hidden, extended.rms_norm_eps), norm(hidden, extended.rms_norm_eps)
    layer.eh_proj = nn.Linear(2 * hidden, hidden, bias=False)
    layer.shared_head = nn.Module()
    layer.shared_head.norm = norm(hidden, extended.rms_norm_eps)
    return layer
