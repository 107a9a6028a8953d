# pyright: basic
# Kernel text: inside @triton.jit, names are tensors of a language that type checkers do not know.
"""Absorbed MLA attention over cache rows, listed or all that are visible: split along the rows, then merged.

``attend_split`` runs an online softmax (base 2) over one part of the rows and writes its normalised output with its
log-sum-exp; ``merge_splits`` weighs the parts. With one part the first launch writes the result itself.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from triton import knobs

from kimigraph.codegen.templates.cache_rows import cache_parts, row_offsets
from kimigraph.codegen.templates.fp8_bytes import e4m3_value
from kimigraph.codegen.templates.rounding import narrow

INTERPRET = knobs.runtime.interpret
CONSTANTS: dict[str, Any] = {}


@triton.jit
def with_sink(total, base, sink, head, H: tl.constexpr):
    """The sum of weights relative to ``base`` (base 2), with a sink's added where there is one."""
    if sink is not None:
        logit = tl.load(sink + head, mask=head < H, other=float("-inf")).to(tl.float32)
        total = total + tl.exp2(logit * 1.4426950408889634 - base)
    return total


@triton.jit
def attend_split(
    q_latent,
    q_rope,
    latent,
    rope,
    scales,
    indices,
    block_table,
    sink,
    lengths,
    out,
    out_lse,
    S: tl.constexpr,
    H: tl.constexpr,
    L: tl.constexpr,
    R: tl.constexpr,
    T: tl.constexpr,
    K: tl.constexpr,
    PAGE: tl.constexpr,
    SCALE: tl.constexpr,
    Q_STRIDE: tl.constexpr,
    Q_ROPE_STRIDE: tl.constexpr,
    LATENT_STRIDE: tl.constexpr,
    ROPE_STRIDE: tl.constexpr,
    SCALE_STRIDE: tl.constexpr,
    SCALED: tl.constexpr,
    INDEX_STRIDE: tl.constexpr,
    LENGTH_STRIDE: tl.constexpr,
    TABLE_STRIDE: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_R: tl.constexpr,
    UPCAST: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """One part of the rows of one query for BLOCK_H heads; the gathered latent tile serves as keys and as values."""
    part = tl.program_id(0) % SPLITS
    row = (tl.program_id(0) // SPLITS).to(tl.int64)
    sequence = row // S
    token = row % S
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    column = tl.arange(0, BLOCK_L)
    turn = tl.arange(0, BLOCK_R)
    in_latent = (head < H)[:, None] & (column < L)[None, :]
    q_row = q_latent + sequence * Q_STRIDE[0] + token * Q_STRIDE[1]
    query = tl.load(q_row + head[:, None] * Q_STRIDE[2] + column[None, :] * Q_STRIDE[3], mask=in_latent, other=0.0)
    if UPCAST:
        query = query.to(tl.float32)
    if R > 0:
        turn_row = q_rope + sequence * Q_ROPE_STRIDE[0] + token * Q_ROPE_STRIDE[1]
        turned = tl.load(
            turn_row + head[:, None] * Q_ROPE_STRIDE[2] + turn[None, :] * Q_ROPE_STRIDE[3],
            mask=(head < H)[:, None] & (turn < R)[None, :],
            other=0.0,
        )
        if UPCAST:
            turned = turned.to(tl.float32)
    if indices is not None:
        index_row = indices + sequence * INDEX_STRIDE[0] + token * INDEX_STRIDE[1]
    end = SPLIT
    limit = K
    if lengths is not None:
        limit = tl.minimum(K, tl.load(lengths + sequence * LENGTH_STRIDE).to(tl.int32) + token.to(tl.int32))
        end = tl.minimum(SPLIT, limit - part * SPLIT)
    peak = tl.full([BLOCK_H], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    mixed = tl.zeros([BLOCK_H, BLOCK_L], tl.float32)
    for start in range(0, end, BLOCK_K):
        pick = part * SPLIT + start + tl.arange(0, BLOCK_K)
        if indices is not None:
            index = tl.load(index_row + pick * INDEX_STRIDE[2], mask=pick < K, other=-1)
        else:
            index = tl.where(pick < limit, pick, -1)
        page, slot, exists = row_offsets(block_table, sequence, index, T, TABLE_STRIDE, PAGE)
        values = tl.load(
            latent + (page * LATENT_STRIDE[0] + slot * LATENT_STRIDE[1])[:, None] + column[None, :] * LATENT_STRIDE[2],
            mask=exists[:, None] & (column < L)[None, :],
            other=0,
        )
        if scales is not None:
            # SCALED columns share a scale.
            scale_row = scales + (page * SCALE_STRIDE[0] + slot * SCALE_STRIDE[1])[:, None]
            scale = tl.load(
                scale_row + (column // SCALED)[None, :], mask=exists[:, None] & (column < L)[None, :], other=0.0
            )
            values = (e4m3_value(values) * scale).to(tl.float32 if UPCAST else tl.bfloat16)
        elif UPCAST:
            values = values.to(tl.float32)
        logit = tl.dot(query, tl.trans(values), input_precision="ieee")
        if R > 0:
            keys = tl.load(
                rope + (page * ROPE_STRIDE[0] + slot * ROPE_STRIDE[1])[:, None] + turn[None, :] * ROPE_STRIDE[2],
                mask=exists[:, None] & (turn < R)[None, :],
                other=0.0,
            )
            if UPCAST:
                keys = keys.to(tl.float32)
            logit = tl.dot(turned, tl.trans(keys), logit, input_precision="ieee")
        logit = tl.where(exists[None, :], logit * (SCALE * 1.4426950408889634), float("-inf"))
        new_peak = tl.maximum(peak, tl.max(logit, 1))
        # Nothing seen yet: -inf minus -inf would be NaN.
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        shrink = tl.exp2(peak - base)
        weight = tl.exp2(logit - base[:, None])
        total = total * shrink + tl.sum(weight, 1)
        mixed = tl.dot(weight.to(values.dtype), values, mixed * shrink[:, None], input_precision="ieee")
        peak = new_peak
    seen = total > 0.0
    whole = with_sink(total, peak, sink, head, H) if SPLITS == 1 else total
    result = tl.where(seen[:, None], mixed / tl.where(seen, whole, 1.0)[:, None], 0.0)
    lse = tl.where(seen, peak + tl.log2(tl.where(seen, total, 1.0)), float("-inf"))
    head_row = (row * SPLITS + part) * H + head
    tl.store(out + head_row[:, None] * L + column[None, :], narrow(result, out, INTERPRET), mask=in_latent)
    # Parts keep base 2; a single part is the result, in natural logarithm.
    tl.store(out_lse + head_row, lse * 0.6931471805599453 if SPLITS == 1 else lse, mask=head < H)


@triton.jit
def merge_splits(
    parts,
    part_lse,
    sink,
    out,
    out_lse,
    H: tl.constexpr,
    L: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_L: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """All parts of a row at once for BLOCK_H heads and BLOCK_L columns; a part that saw nothing is not read."""
    groups: tl.constexpr = (H + BLOCK_H - 1) // BLOCK_H
    row = (tl.program_id(0) // groups).to(tl.int64)
    head = (tl.program_id(0) % groups) * BLOCK_H + tl.arange(0, BLOCK_H)
    column = tl.program_id(1) * BLOCK_L + tl.arange(0, BLOCK_L)
    part = tl.arange(0, BLOCK_P)
    source = (row * SPLITS + part)[:, None] * H + head[None, :]
    present = (part < SPLITS)[:, None] & (head < H)[None, :]
    lse = tl.load(part_lse + source, mask=present, other=float("-inf"))
    peak = tl.max(lse, 0)
    base = tl.where(peak == float("-inf"), 0.0, peak)
    weight = tl.exp2(lse - base[None, :])
    total = tl.sum(weight, 0)
    seen = total > 0.0
    weight = weight / tl.where(seen, with_sink(total, base, sink, head, H), 1.0)[None, :]
    values = tl.load(
        parts + source[:, :, None] * L + column[None, None, :],
        mask=(lse > float("-inf"))[:, :, None] & (column < L)[None, None, :],
        other=0.0,
    )
    result = tl.sum(values * weight[:, :, None], 0)
    target = row * H + head
    inside = (head < H)[:, None] & (column < L)[None, :]
    tl.store(out + target[:, None] * L + column[None, :], narrow(result, out, INTERPRET), mask=inside)
    if tl.program_id(1) == 0:
        natural = tl.where(seen, base + tl.log2(tl.where(seen, total, 1.0)), float("-inf")) * 0.6931471805599453
        tl.store(out_lse + target, natural, mask=head < H)


def launch(q_latent, q_rope, latent, rope, rows, block_table=None, sink=None, *, memory=torch):
    """The operator's tensors in schema order -> (out [B, S, H, L], lse fp32 [B, S, H]).

    ``rows`` are indices, or the lengths of the visible prefixes (or None) where all visible rows are attended to.
    """
    out = memory.empty(CONSTANTS["out"], dtype=q_latent.dtype, device=q_latent.device)
    lse = memory.empty(CONSTANTS["lse"], dtype=torch.float32, device=q_latent.device)
    attend, merge = CONSTANTS["attend_split"], CONSTANTS["merge_splits"]
    latent, rope, scales = cache_parts(latent, rope, CONSTANTS["columns"])
    indices, lengths = (rows, None) if CONSTANTS["listed"] else (None, rows)
    operands = (q_latent, q_rope, latent, rope, scales, indices, block_table, sink, lengths)
    if INTERPRET:
        # The interpreter's products of 16-bit floats are wrong (bf16) or rounded (fp16).
        attend = {**attend, "UPCAST": True, "INTERPRET": True}
    if merge is None:
        attend_split[CONSTANTS["attend_grid"]](*operands, out, lse, **attend, **CONSTANTS["attend_options"])
        return out, lse
    parts = memory.empty(CONSTANTS["parts"], dtype=torch.float32, device=q_latent.device)
    part_lse = memory.empty(CONSTANTS["part_lse"], dtype=torch.float32, device=q_latent.device)
    attend_split[CONSTANTS["attend_grid"]](*operands, parts, part_lse, **attend, **CONSTANTS["attend_options"])
    merge = {**merge, "INTERPRET": INTERPRET}
    merge_splits[CONSTANTS["merge_grid"]](parts, part_lse, sink, out, lse, **merge, **CONSTANTS["merge_options"])
    return out, lse
