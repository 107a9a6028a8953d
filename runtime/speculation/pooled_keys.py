"""Pooled index keys say of each place whether it holds a token: of what was rejected they must not say so."""

from collections.abc import Mapping

import torch
from torch import Tensor

SUFFIX = ".index_packed"
"""Ends the names of such caches [B, T, D], whose last column is that flag."""


def forget_behind(caches: Mapping[str, Tensor], lengths: Tensor) -> None:
    """Let none of the places from ``lengths`` [B] on hold a token."""
    for name, cache in caches.items():
        if name.endswith(SUFFIX):
            places = torch.arange(cache.shape[1], device=cache.device)
            cache[..., -1].masked_fill_(places >= lengths.unsqueeze(-1), 0)
