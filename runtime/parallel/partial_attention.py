"""Attention over the rows that each rank holds, put together: weighted by what each part had of the softmax."""

import torch
from torch import Tensor

from kimigraph.runtime.parallel.collectives import Gather, Rank


def merge(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """The attention over all rows from its parts: ``outs`` [W, ..., D], ``lses`` fp32 [W, ...] natural logarithms.

    A part without rows has -inf and counts as nothing; without any rows the result is 0 and -inf.
    """
    whole = lses.logsumexp(0)
    weights = torch.where(lses == -torch.inf, 0.0, (lses - torch.where(whole == -torch.inf, 0.0, whole)).exp())
    parts = torch.where(weights.unsqueeze(-1) > 0, outs.float() * weights.unsqueeze(-1), 0.0)
    return parts.sum(0).to(outs.dtype), whole


def merge_ranks(out: Tensor, lse: Tensor) -> Rank[tuple[Tensor, Tensor]]:
    """One rank of the same: every rank gets the whole."""
    outs = yield Gather(out)
    lses = yield Gather(lse)
    return merge(outs, lses)
