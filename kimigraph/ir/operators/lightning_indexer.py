"""``lightning_indexer``: score every cached key, weigh the heads, take the top k.

    score[b, s, t] = sum_h weights[b, s, h] * relu(scale * dot(q[b, s, h], keys[b, t]))

Shapes: ``q`` [B, S, H, D]; ``keys`` [B, T, D], or pages [P, page, D] with ``block_table`` int32 [B, T / page];
``weights`` [B, S, H], any sign; ``lengths`` integer, [] or [B]: keys visible to row 0 (row s sees ``lengths + s``, at
most T); ``mask`` bool, expandable to [B, S, T], True = visible. Floating types of any width; sums are fp32.
``scale`` > 0. Returns int32 [B, S, k]: the set of the first min(k, visible) keys under (score descending, index
ascending; -0 as +0; NaN as -inf), listed in ascending index, then -1. With a block table the ids are logical positions.

Source: DeepSeek-V3.2-Exp, the Lightning Indexer. Errors: none at run time; shapes are checked by the fake implementation.
"""

import torch

from kimigraph.ir.operators.registry import Cost, Operator, nbytes, register
from kimigraph.ir.reference.lightning_indexer import lightning_indexer


def _fake(q, keys, weights, lengths=None, mask=None, *, k, scale, block_table=None, descriptor=""):
    torch._check(q.dim() == 4 and keys.dim() == 3 and q.shape[-1] == keys.shape[-1], lambda: f"lightning_indexer: q {tuple(q.shape)} and keys {tuple(keys.shape)} do not fit; want [B, S, H, D] and [B, T, D]")
    torch._check(tuple(weights.shape) == tuple(q.shape[:3]), lambda: f"lightning_indexer: weights {tuple(weights.shape)}, want {tuple(q.shape[:3])}")
    return q.new_empty((q.shape[0], q.shape[1], k), dtype=torch.int32)


def _cost(q, keys, weights, lengths=None, mask=None, *, k, scale, block_table=None, descriptor=""):
    total = keys.shape[1] if block_table is None else block_table.shape[1] * keys.shape[1]
    pairs = q.shape[0] * q.shape[1] * total
    read = q.shape[0] * total * keys.shape[-1] * keys.element_size()
    written = q.shape[0] * q.shape[1] * k * 4
    return Cost(bytes=read + written + nbytes(q, weights, lengths, mask), flops=pairs * q.shape[2] * (2 * q.shape[3] + 2))


OPERATOR = register(
    Operator(
        name="lightning_indexer",
        signature=(
            "(Tensor q, Tensor keys, Tensor weights, Tensor? lengths=None, Tensor? mask=None, *, int k, float scale,"
            ' Tensor? block_table=None, str descriptor="") -> Tensor'
        ),
        summary="score the index keys, weigh the heads, list the top k",
        reference=lightning_indexer,
        fake=_fake,
        cost=_cost,
    )
)
