"""``index_scores``: the scores of keys that ``lightning_indexer`` has picked.

    out[b, s, j] = sum_h weights[b, s, h] * relu(scale * dot(q[b, s, h], keys[b, picks[b, s, j]]))

Shapes: those of ``lightning_indexer`` for what has its names (``q``, ``keys``, ``weights``, ``block_table``,
``q_scales``, ``scale``, ``quantises_q``), beside ``picks`` int32 [B, S, k], positions in the sequence (with a block
table logical ones) or -1. Returns fp32 [B, S, k]: -inf for -1; NaN as -inf, -0 as +0. Sums are
those of the indexer up to the order of fp32 addition.

Source: as ``lightning_indexer``, behind which it stands where ranks share out a sequence and compare the scores of
their picks. Errors: none at run time; the fake implementation raises ValueError for shapes that do not fit.
"""

import torch

from kimigraph.ir.operators.registry import Cost, Operator, nbytes, register
from kimigraph.ir.operators.shapes import (
    cache,
    check,
    check_groups,
    check_integer,
    check_quantised_by,
    check_table,
    key_row,
)
from kimigraph.ir.reference.index_scores import index_scores

_NAME = "index_scores"


def _fake(
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
    row = key_row(_NAME, keys, q.shape[-1], descriptor)
    sizes = check(
        _NAME,
        q=(q, "B S H D"),
        weights=(weights, "B S H"),
        keys=(keys, cache(block_table, row)),
        picks=(picks, "B S K"),
    )
    check_groups(_NAME, q, keys, q_scales, descriptor)
    if quantises_q:
        check_quantised_by(_NAME, q, keys, q_scales, descriptor)
    check_table(_NAME, block_table, sizes["B"])
    check_integer(_NAME, picks=picks)
    return q.new_empty(picks.shape, dtype=torch.float32)


def _cost(
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
) -> Cost:
    heads, width = q.shape[2:]
    read = picks.numel() * (keys.shape[-1] * keys.element_size() + 8)
    return Cost(bytes=read + nbytes(q, weights, block_table, q_scales), flops=picks.numel() * heads * (2 * width + 2))


OPERATOR = register(
    Operator(
        name=_NAME,
        signature=(
            "(Tensor q, Tensor keys, Tensor weights, Tensor picks, *, float scale, Tensor? block_table=None,"
            ' Tensor? q_scales=None, bool quantises_q=False, str descriptor="") -> Tensor'
        ),
        summary="the scores of picked index keys",
        documentation=__doc__,
        reference=index_scores,
        fake=_fake,
        cost=_cost,
    )
)
