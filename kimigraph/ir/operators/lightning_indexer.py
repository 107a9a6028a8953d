"""``lightning_indexer``: score every cached key, weigh the heads, take the top k.

    score[b, s, t] = sum_h weights[b, s, h] * relu(scale * dot(q[b, s, h], keys[b, t]))

Shapes: ``q`` [B, S, H, D]; ``keys`` [B, T, D], or pages [P, page, D] with ``block_table`` int32 [B, T / page], whose
entries below 0 are unmapped pages (their keys are never visible); ``weights`` [B, S, H], any sign; ``lengths`` integer,
[] or [B]: keys visible to row 0 (row s sees ``lengths + s``, at most T); ``mask`` bool, expandable to [B, S, T], True =
visible. With neither, every key is visible. Floating types of any width; sums are fp32. ``scale`` > 0. Keys may be
bytes, uint8 [., ., row], under a quantised ``descriptor``. Where that has groups (MXFP8) ``q`` may be bytes as well,
E4M3 with ``q_scales`` uint8 [B, S, H, ceil(D / group)], E8M0. Scales of groups stand inside the sum under the ReLU, so
neither side's can be taken out of it as those of whole keys can:

    dot(q[b, s, h], keys[b, t]) = sum_g 2^(q_scales[b, s, h, g] + key_scales[b, t, g] - 254) dot over group g of E4M3

With ``quantises_q`` a real ``q``, rotated where the keys are, is first put into their groups as by ``mxfp8_quantize``.

Returns int32 [B, S, k]: the set of the first min(k, visible) keys under (score descending, index ascending; -0 as +0;
NaN as -inf), listed in ascending index, then -1. With a block table the ids are logical positions; with ``rows`` they
are the rows of the flattened cache instead, page * page size + offset, in the same order.

Source: DeepSeek-V3.2-Exp, the Lightning Indexer. Errors: none at run time; the fake implementation raises ValueError
for shapes that do not fit, a scale that is not positive and a negative k.
"""

import torch

from kimigraph.ir.operators.registry import Cost, Operator, nbytes, register
from kimigraph.ir.operators.shapes import (
    cache,
    capacity,
    check,
    check_groups,
    check_integer,
    check_quantised_by,
    check_table,
    key_row,
)
from kimigraph.ir.reference.lightning_indexer import lightning_indexer


def _fake(
    q: torch.Tensor,
    keys: torch.Tensor,
    weights: torch.Tensor,
    lengths: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    *,
    k: int,
    scale: float,
    block_table: torch.Tensor | None = None,
    q_scales: torch.Tensor | None = None,
    rows: bool = False,
    quantises_q: bool = False,
    descriptor: str = "",
) -> torch.Tensor:
    name = "lightning_indexer"
    sizes = check(name, q=(q, "B S H D"), weights=(weights, "B S H"))
    row = key_row(name, keys, q.shape[-1], descriptor)
    sizes |= check(name, q=(q, "B S H D"), keys=(keys, cache(block_table, row)))
    check_groups(name, q, keys, q_scales, descriptor)
    if quantises_q:
        check_quantised_by(name, q, keys, q_scales, descriptor)
    check_table(name, block_table, sizes["B"])
    check_integer(name, lengths=lengths)
    if rows and block_table is None:
        raise ValueError(f"{name}: rows are those of pages; give a block_table, or list positions")
    if lengths is not None and (lengths.dim() > 1 or lengths.numel() not in (1, sizes["B"])):
        raise ValueError(f"{name}: lengths is {list(lengths.shape)}, want [] or [B] with B = {sizes['B']}")
    if mask is not None:
        if mask.dtype != torch.bool:
            raise ValueError(f"{name}: mask is {mask.dtype}, want torch.bool with True for visible keys")
        mask.expand(sizes["B"], sizes["S"], capacity(keys, block_table))
    if not scale > 0 or k < 0:
        raise ValueError(f"{name}: scale is {scale} and k is {k}, want scale > 0 and k >= 0")
    return q.new_empty((sizes["B"], sizes["S"], k), dtype=torch.int32)


def _cost(
    q: torch.Tensor,
    keys: torch.Tensor,
    weights: torch.Tensor,
    lengths: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    *,
    k: int,
    scale: float,
    block_table: torch.Tensor | None = None,
    q_scales: torch.Tensor | None = None,
    rows: bool = False,
    quantises_q: bool = False,
    descriptor: str = "",
) -> Cost:
    batch, tokens, heads, width = q.shape
    total = capacity(keys, block_table)
    read = batch * total * keys.shape[-1] * keys.element_size() + nbytes(
        q, weights, lengths, mask, block_table, q_scales
    )
    written = batch * tokens * k * 4
    return Cost(bytes=read + written, flops=batch * tokens * total * heads * (2 * width + 2))


OPERATOR = register(
    Operator(
        name="lightning_indexer",
        signature=(
            "(Tensor q, Tensor keys, Tensor weights, Tensor? lengths=None, Tensor? mask=None, *, int k, float scale,"
            " Tensor? block_table=None, Tensor? q_scales=None, bool rows=False, bool quantises_q=False,"
            ' str descriptor="") -> Tensor'
        ),
        summary="score the index keys, weigh the heads, list the top k",
        documentation=__doc__,
        reference=lightning_indexer,
        fake=_fake,
        cost=_cost,
    )
)
