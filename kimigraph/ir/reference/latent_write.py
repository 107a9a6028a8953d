"""Reference of ``kimigraph::latent_write``."""

import torch

from kimigraph.ir.reference.cache_bytes import latent_bytes


def latent_write(
    latent: torch.Tensor,
    rope: torch.Tensor | None,
    values: torch.Tensor,
    rope_values: torch.Tensor | None,
    positions: torch.Tensor,
    *,
    block_table: torch.Tensor | None = None,
    descriptor: str = "",
) -> None:
    """See ``kimigraph.ir.operators.latent_write``: every position is checked before the first row is written."""
    page = latent.shape[1]
    capacity = page if block_table is None else block_table.shape[1] * page
    sequence, token = (positions >= 0).nonzero(as_tuple=True)
    position = positions[sequence, token].long()
    if (position >= capacity).any():
        raise IndexError(f"latent_write: position {int(position.max())} lies beyond the cache's {capacity} positions")
    block, row = sequence, position
    if block_table is not None:
        block, row = block_table[sequence, position // page].long(), position % page
        if (block < 0).any():
            at = int((block < 0).nonzero()[0])
            place = f"position {int(position[at])} of sequence {int(sequence[at])}"
            raise IndexError(f"latent_write: {place} lies on a page that is not mapped")
    new = values[sequence, token]
    new_rope = None if rope_values is None else rope_values[sequence, token]
    if latent.dtype == torch.uint8:
        latent[block, row] = latent_bytes(new, new_rope, descriptor)
        return
    if rope is None and new_rope is not None:
        latent[block, row] = torch.cat([new, new_rope], dim=-1).to(latent.dtype)
        return
    latent[block, row] = new.to(latent.dtype)
    if rope is not None and new_rope is not None:
        rope[block, row] = new_rope.to(rope.dtype)
