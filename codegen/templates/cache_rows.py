# pyright: basic
# Kernel text: inside @triton.jit, names are tensors of a language that type checkers do not know.
"""Rows of a latent cache: where they stand, and the parts of a row that holds several."""

import torch
import triton
import triton.language as tl


@triton.jit
def row_offsets(block_table, sequence, index, T: tl.constexpr, TABLE_STRIDE: tl.constexpr, PAGE: tl.constexpr):
    """Page (or sequence) id and row inside it, both int64, and whether the row exists: in range, in a mapped page."""
    exists = (index >= 0) & (index < T)
    index = index.to(tl.int64)
    if PAGE == 0:
        page = sequence + index * 0
        slot = index
    else:
        entry = block_table + sequence * TABLE_STRIDE[0] + (index // PAGE) * TABLE_STRIDE[1]
        page = tl.load(entry, mask=exists, other=-1).to(tl.int64)
        slot = index % PAGE
        exists = exists & (page >= 0)
    return page, slot, exists


@triton.jit
def listed_id(
    position, wins, block_table, sequence, TABLE_STRIDE: tl.constexpr, PAGE: tl.constexpr, ROWS: tl.constexpr
):
    """What an indexer lists for a position: itself, or with ROWS the row of the flattened pages."""
    listed = position
    if ROWS:
        entry = block_table + sequence * TABLE_STRIDE[0] + (position // PAGE).to(tl.int64) * TABLE_STRIDE[1]
        listed = tl.load(entry, mask=wins, other=0).to(tl.int32) * PAGE + position % PAGE
    return listed


def cache_parts(latent, rope, columns):
    """Views of a cache whose rows hold several parts: latent (bytes when quantised), rope part and fp32 scales.

    ``columns`` gives the first and the last column of each in elements of its own type, or None where it is absent;
    None alone for a cache whose tensors are the parts.
    """
    if columns is None:
        return latent, rope, None
    at_latent, at_rope, at_scales = columns
    packed = latent.dtype == torch.uint8
    whole = latent.view(torch.bfloat16) if packed else latent
    rope = None if at_rope is None else whole[..., slice(*at_rope)]
    scales = latent.view(torch.float32)[..., slice(*at_scales)] if packed else None
    return latent[..., slice(*at_latent)], rope, scales
