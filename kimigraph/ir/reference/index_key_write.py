"""Reference of ``kimigraph::index_key_write``."""

import torch

from kimigraph.ir.reference.cache_bytes import descriptor_fields, index_key_planes, quantise
from kimigraph.ir.reference.cache_places import cache_places
from kimigraph.ir.reference.key_preparation import layer_normed, rotated


def index_key_write(
    keys: torch.Tensor,
    values: torch.Tensor,
    positions: torch.Tensor,
    norm_weight: torch.Tensor | None = None,
    norm_bias: torch.Tensor | None = None,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    *,
    norm_eps: float = 1e-6,
    rope_style: str = "none",
    block_table: torch.Tensor | None = None,
    descriptor: str = "",
) -> None:
    """See ``kimigraph.ir.operators.index_key_write``: every position is checked before the first row is written."""
    sequence, token, block, row = cache_places("index_key_write", keys, positions, block_table)
    values = rotated(layer_normed(values, norm_weight, norm_bias, norm_eps), cos, sin, rope_style)
    if keys.dtype == torch.uint8:
        planes = index_key_planes(keys)
        parts = quantise(values[sequence, token], values.shape[-1], descriptor_fields(descriptor)["scales"])
        for plane, part in zip(planes, parts, strict=True):
            plane[block, row] = part.view(torch.uint8)
        return
    keys[block, row] = values[sequence, token].to(keys.dtype)
