"""Reference of ``kimigraph::latent_write``."""

import torch

from kimigraph.ir.reference.cache_bytes import latent_bytes
from kimigraph.ir.reference.cache_places import cache_places
from kimigraph.ir.reference.key_preparation import root_mean_square_normed, rotated


def latent_write(
    latent: torch.Tensor,
    rope: torch.Tensor | None,
    values: torch.Tensor,
    rope_values: torch.Tensor | None,
    positions: torch.Tensor,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    *,
    rope_style: str = "none",
    block_table: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    norm_eps: float = 1e-6,
    descriptor: str = "",
) -> None:
    """See ``kimigraph.ir.operators.latent_write``: every position is checked before the first row is written."""
    sequence, token, block, row = cache_places("latent_write", latent, positions, block_table)
    if not len(sequence):  # all rows are skipped: another rank has them
        return
    new = root_mean_square_normed(values[sequence, token], norm_weight, norm_eps)
    turned = None if rope_values is None else rotated(rope_values, cos, sin, rope_style)
    new_rope = None if turned is None else turned[sequence, token]
    if latent.dtype == torch.uint8:
        latent[block, row] = latent_bytes(new, new_rope, descriptor)
        return
    if rope is None and new_rope is not None:
        latent[block, row] = torch.cat([new, new_rope], dim=-1).to(latent.dtype)
        return
    latent[block, row] = new.to(latent.dtype)
    if rope is not None and new_rope is not None:
        rope[block, row] = new_rope.to(rope.dtype)
