"""Reference of ``kimigraph::index_scores``."""

import math

import torch

from kimigraph.ir.reference.key_scores import key_scores


def index_scores(
    q: torch.Tensor,
    keys: torch.Tensor,
    weights: torch.Tensor,
    picks: torch.Tensor,
    *,
    scale: float,
    block_table: torch.Tensor | None = None,
    q_scales: torch.Tensor | None = None,
    quantises_q: bool = False,
    descriptor: str = "",
) -> torch.Tensor:
    """See ``kimigraph.ir.operators.index_scores``: all scores, as the indexer has them, of which the picks' are taken.

    A product of the picked keys alone would sum in another order, and a tie could cease to be one.
    """
    scores = key_scores(
        q,
        keys,
        weights,
        scale=scale,
        block_table=block_table,
        q_scales=q_scales,
        quantises_q=quantises_q,
        descriptor=descriptor,
    )
    if not scores.shape[-1]:
        return torch.full(picks.shape, -math.inf, device=q.device)
    return torch.where(picks < 0, -math.inf, scores.gather(-1, picks.clamp_min(0).long()))
