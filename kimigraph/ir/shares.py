"""Which part of a tensor one of several ranks has: equal shares of one dim, or of each of a dim's equal blocks.

The channels q | k | v of a convolution are three blocks: rank r has the r-th share of each, so that what follows finds
its own heads. An artifact of several ranks carries this file's text, so it imports torch alone.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch


class Share(NamedTuple):
    """``dim`` is shared out among ``ways`` ranks, block by block."""

    dim: int
    blocks: int
    ways: int

    def at(self, dim: int) -> "Share":
        """The same of another dim."""
        return Share(dim, self.blocks, self.ways)

    def in_blocks(self, blocks: int) -> "Share":
        """The same of a dim of so many blocks."""
        return Share(self.dim, blocks, self.ways)

    def divides(self, size: int) -> bool:
        """Whether a dim of ``size`` elements has equal shares."""
        return size % (self.blocks * self.ways) == 0

    def local(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape that a rank has of a tensor of ``shape``."""
        return (*shape[: self.dim], shape[self.dim] // self.ways, *shape[self.dim + 1 :])

    def whole(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of the tensor of which each rank has ``shape``."""
        return (*shape[: self.dim], shape[self.dim] * self.ways, *shape[self.dim + 1 :])

    def spans(self, size: int, rank: int) -> list[tuple[int, int]]:
        """First index and the one behind the last of each piece that ``rank`` has of a dim of ``size`` elements."""
        block, piece = size // self.blocks, size // (self.blocks * self.ways)
        return [(each * block + rank * piece, each * block + (rank + 1) * piece) for each in range(self.blocks)]

    def take(self, tensor: torch.Tensor, rank: int) -> torch.Tensor:
        """What ``rank`` has of the whole ``tensor``, in memory of its own."""
        pieces = [tensor[(slice(None),) * self.dim + (slice(*span),)] for span in self.spans(self._size(tensor), rank)]
        return torch.cat(pieces, dim=self.dim)

    def join(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """The whole tensor from what the ranks have, in their order."""
        blocks = [part.chunk(self.blocks, dim=self.dim) for part in parts]
        return torch.cat([rank[each] for each in range(self.blocks) for rank in blocks], dim=self.dim)

    def _size(self, tensor: torch.Tensor) -> int:
        return tensor.shape[self.dim]
