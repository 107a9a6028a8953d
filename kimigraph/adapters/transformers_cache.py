# pyright: basic
# Reason: the cache classes of transformers carry no usable types.
"""The static caches of transformers as a flat dict of tensors, and back inside ``forward``.

``StaticLayer`` keeps the latent as ``keys`` [B, 1, T, L], the rope part as ``values`` [B, 1, T, R], with a counter;
``StaticIndexedLayer`` the index keys as ``indexer_keys`` [B, T, D], with another; ``LinearAttentionLayer`` the last raw
inputs of the convolution and the delta-rule state. Flat names are ``cache.<layer>.*`` and ``state.<layer>.*``.
"""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class CacheTensor:
    """One tensor of the flat cache: where it sits in transformers' cache object, and what it looks like.

    ``key`` is its index in a dict-valued attribute, or None. ``role`` is ``latent``, ``rope``, ``index_key``,
    ``index_packed`` (pooled indexer: key | gate score | valid flag), ``length``, ``index_length``, ``conv`` or ``kda``.
    """

    name: str
    role: str
    layer: int
    attribute: str
    key: int | None
    shape: tuple[int, ...]
    dtype: torch.dtype


def static_cache(config: Any, batch: int, context: int, dtype: torch.dtype, has_state: bool) -> Any:
    """An initialised ``StaticCache`` of the text model ``config`` on the meta device.

    ``has_state``: the linear attention layers continue a sequence (a decode step) instead of starting one.
    """
    from transformers import StaticCache
    from transformers.cache_utils import LinearAttentionLayer, StaticLayer

    cache = StaticCache(config=config, max_cache_len=context)
    for index, layer in enumerate(cache.layers):
        if isinstance(layer, StaticLayer):
            _initialise_attention(layer, config, index, batch, dtype)
        elif isinstance(layer, LinearAttentionLayer):
            _initialise_linear(layer, config, batch, dtype, has_state)
        else:
            raise NotImplementedError(f"layer {index} keeps its cache in a {type(layer).__name__}")
    return cache


def _shares_picks(config: Any, index: int) -> bool:
    """Whether the layer reuses the picks of an earlier one, so that it has no index keys."""
    return bool(getattr(config, "indexer_types", None)) and config.indexer_types[index] == "shared"


def _initialise_attention(layer: Any, config: Any, index: int, batch: int, dtype: torch.dtype) -> None:
    from transformers.cache_utils import StaticIndexedLayer

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    layer.lazy_initialization(empty(batch, 1, 0, config.kv_lora_rank), empty(batch, 1, 0, config.qk_rope_head_dim))
    if not isinstance(layer, StaticIndexedLayer) or _shares_picks(config, index):
        return
    pooled = hasattr(config, "index_kpool")
    width = 2 * config.index_head_dim + 1 if pooled else config.index_head_dim
    vars(layer)["packed_index_keys"] = pooled  # an attribute that transformers does not declare
    layer.lazy_initialization_indexer(empty(batch, 0, width))


def _initialise_linear(layer: Any, config: Any, batch: int, dtype: torch.dtype, has_state: bool) -> None:
    heads, width = config.linear_num_heads, config.linear_head_dim
    layer.lazy_initialization(
        conv_states=torch.empty((batch, 3 * heads * width, 0), dtype=dtype, device="meta"),
        recurrent_states=torch.empty((batch, heads, width, width), dtype=torch.float32, device="meta"),
        conv_kernel_size=config.linear_conv_kernel_dim,
    )
    layer.has_previous_state[0] = has_state


_ROLES = {
    "keys": "latent",
    "values": "rope",
    "indexer_keys": "index_key",
    "cumulative_length": "length",
    "indexer_cumulative_length": "index_length",
    "conv_states": "conv",
    "recurrent_states": "kda",
}


def cache_tensors(cache: Any) -> tuple[CacheTensor, ...]:
    """The tensors of an initialised cache in layer order, empty ones (rope of width 0) left out."""
    found: list[CacheTensor] = []
    for index, layer in enumerate(cache.layers):
        for attribute, role in _ROLES.items():
            value = getattr(layer, attribute, None)
            entries = value.items() if isinstance(value, dict) else [(None, value)]
            for key, tensor in entries:
                if isinstance(tensor, Tensor) and tensor.numel():
                    found.append(_cache_tensor(index, layer, attribute, key, tensor, role))
    return tuple(found)


def _cache_tensor(index: int, layer: Any, attribute: str, key: int | None, tensor: Tensor, role: str) -> CacheTensor:
    if role == "index_key" and getattr(layer, "packed_index_keys", False):
        role = "index_packed"
    group = "state" if role in ("conv", "kda") else "cache"
    suffix = f"_{key}" if key else ""
    return CacheTensor(
        f"{group}.{index}.{role}{suffix}", role, index, attribute, key, tuple(tensor.shape), tensor.dtype
    )


class CacheBuilder:
    """Rebuilds the cache object around caller-given tensors, without running any of its initialisation."""

    def __init__(self, cache: Any, tensors: tuple[CacheTensor, ...]) -> None:
        self._cache = cache
        self._tensors = tensors

    def build(self, flat: dict[str, Tensor]) -> Any:
        """A cache whose layers hold the tensors of ``flat`` themselves, so that updates reach the caller."""
        cache = copy.copy(self._cache)
        cache.layers = [self._copy_layer(layer) for layer in self._cache.layers]
        for item in self._tensors:
            layer, tensor = cache.layers[item.layer], flat[item.name]
            if item.key is None:
                setattr(layer, item.attribute, tensor)
            else:
                getattr(layer, item.attribute)[item.key] = tensor
            layer.device = layer.indexer_device = tensor.device
        for layer in cache.layers:
            self._fill_empty(layer)
        return cache

    @staticmethod
    def _copy_layer(layer: Any) -> Any:
        copied = copy.copy(layer)
        for attribute, value in vars(layer).items():
            if isinstance(value, dict):
                setattr(copied, attribute, dict(value))
        return copied

    @staticmethod
    def _fill_empty(layer: Any) -> None:
        """A rope cache of width 0 holds nothing a caller could own."""
        values = getattr(layer, "values", None)
        if isinstance(values, Tensor) and values.numel() == 0:
            layer.values = layer.keys.new_empty(values.shape)
