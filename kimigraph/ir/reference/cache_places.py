"""Where the references of the cache writers put rows: positions looked up and checked before anything is written."""

import torch


def cache_places(
    operator: str, cache: torch.Tensor, positions: torch.Tensor, block_table: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(sequence, token, block, row) of every position that is not negative; ``cache`` is indexed by (block, row).

    Raises IndexError, naming ``operator`` and the position, for one beyond the cache or on a page that is not mapped.
    """
    page = cache.shape[1]
    capacity = page if block_table is None else block_table.shape[1] * page
    sequence, token = (positions >= 0).nonzero(as_tuple=True)
    position = positions[sequence, token].long()
    if (position >= capacity).any():
        raise IndexError(f"{operator}: position {int(position.max())} lies beyond the cache's {capacity} positions")
    if block_table is None:
        return sequence, token, sequence, position
    block = block_table[sequence, position // page].long()
    if (block < 0).any():
        at = int((block < 0).nonzero()[0])
        place = f"position {int(position[at])} of sequence {int(sequence[at])}"
        raise IndexError(f"{operator}: {place} lies on a page that is not mapped")
    return sequence, token, block, position % page
