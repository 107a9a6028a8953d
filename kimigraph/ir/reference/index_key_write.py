"""Reference of ``kimigraph::index_key_write``."""

import torch

from kimigraph.ir.reference.cache_bytes import descriptor_fields, index_key_planes, quantise


def index_key_write(
    keys: torch.Tensor,
    values: torch.Tensor,
    positions: torch.Tensor,
    *,
    block_table: torch.Tensor | None = None,
    descriptor: str = "",
) -> None:
    """See ``kimigraph.ir.operators.index_key_write``: every position is checked before the first row is written."""
    page = keys.shape[1]
    capacity = page if block_table is None else block_table.shape[1] * page
    sequence, token = (positions >= 0).nonzero(as_tuple=True)
    position = positions[sequence, token].long()
    if (position >= capacity).any():
        raise IndexError(
            f"index_key_write: position {int(position.max())} lies beyond the cache's {capacity} positions"
        )
    block, row = sequence, position
    if block_table is not None:
        block, row = block_table[sequence, position // page].long(), position % page
        if (block < 0).any():
            at = int((block < 0).nonzero()[0])
            place = f"position {int(position[at])} of sequence {int(sequence[at])}"
            raise IndexError(f"index_key_write: {place} lies on a page that is not mapped")
    if keys.dtype == torch.uint8:
        planes = index_key_planes(keys)
        parts = quantise(values[sequence, token], values.shape[-1], descriptor_fields(descriptor)["scales"])
        for plane, part in zip(planes, parts, strict=True):
            plane[block, row] = part.view(torch.uint8)
        return
    keys[block, row] = values[sequence, token].to(keys.dtype)
