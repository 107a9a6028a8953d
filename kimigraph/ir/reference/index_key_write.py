"""Reference of ``kimigraph::index_key_write``."""

import torch

from kimigraph.ir.reference.cache_bytes import index_key_bytes, index_key_planes
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
    if not len(sequence):  # all rows are skipped: another rank has them
        return
    values = rotated(layer_normed(values, norm_weight, norm_bias, norm_eps), cos, sin, rope_style)
    if keys.dtype == torch.uint8:
        planes = index_key_planes(keys, descriptor)
        for plane, part in zip(planes, index_key_bytes(values[sequence, token], descriptor), strict=True):
            plane[block, row] = part
        return
    keys[block, row] = values[sequence, token].to(keys.dtype)
