# pyright: basic
# Kernel text: inside @triton.jit, names are tensors of a language that type checkers do not know.
"""Lightning Indexer: scores, then the exact top k, in two launches.

``score_keys`` writes one unsigned code a (query row, key), monotone in the score; ``select_row`` finds the k-th code by
8-bit digits and lists the winners in ascending index. The codes are the seam along which a row can be split over
several programs: a histogram adds, and the emission needs only the counts of the parts before it.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from triton import knobs

from kimigraph.codegen.templates.cache_rows import listed_id
from kimigraph.codegen.templates.index_rows import key_offsets, key_planes, key_scores, key_tile
from kimigraph.codegen.templates.order_code import order_code

INTERPRET = knobs.runtime.interpret
CONSTANTS: dict[str, Any] = {}


@triton.jit
def visible_limit(lengths, sequence, token, LENGTH_STRIDE: tl.constexpr, T: tl.constexpr):
    """Keys below this position may be visible to query row ``token``: min(length + token, T), or T without lengths."""
    limit = tl.full([], T, tl.int64)
    if lengths is not None:
        limit = tl.minimum(tl.load(lengths + sequence * LENGTH_STRIDE).to(tl.int64) + token, T)
    return limit.to(tl.int32)


@triton.jit
def score_keys(
    q,
    keys,
    weights,
    lengths,
    mask,
    block_table,
    q_scales,
    codes,
    S: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    T: tl.constexpr,
    PAGE: tl.constexpr,
    SCALE: tl.constexpr,
    Q_STRIDE: tl.constexpr,
    KEY_STRIDE: tl.constexpr,
    WEIGHT_STRIDE: tl.constexpr,
    LENGTH_STRIDE: tl.constexpr,
    MASK_STRIDE: tl.constexpr,
    TABLE_STRIDE: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    UPCAST: tl.constexpr,
    PLANE: tl.constexpr,
    GROUP: tl.constexpr,
    Q_SCALE_STRIDE: tl.constexpr,
    QUANTISES: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """One block of keys of one sequence against BLOCK_S query rows: the keys are read once, heads sum inside a row."""
    first = tl.program_id(0) * BLOCK_T
    sequence = tl.program_id(1).to(tl.int64)
    first_token = tl.program_id(2) * BLOCK_S
    last_token = tl.minimum(first_token + BLOCK_S, S) - 1
    reach = visible_limit(lengths, sequence, last_token, LENGTH_STRIDE, T)
    if first >= reach:
        return
    position = first + tl.arange(0, BLOCK_T)
    offset, exists = key_offsets(block_table, sequence, position, position < reach, KEY_STRIDE, TABLE_STRIDE, PAGE)
    key_row, group_row, key_scale = key_planes(keys, offset, exists, D, PLANE, GROUP)
    tile = key_tile(key_row, group_row, exists, 0, D, KEY_STRIDE[2], GROUP, BLOCK_D, UPCAST, "bits")
    for step in range(0, last_token - first_token + 1):
        token = first_token + step
        score = key_scale * key_scores(
            q, weights, q_scales, sequence, token.to(tl.int64), tile, key_row, group_row, exists,
            H, D, Q_STRIDE, KEY_STRIDE, WEIGHT_STRIDE, Q_SCALE_STRIDE, GROUP, QUANTISES, 1.0, SCALE, BLOCK_H, BLOCK_D,
            UPCAST, "bits",
        )  # fmt: skip
        visible = exists & (position < visible_limit(lengths, sequence, token, LENGTH_STRIDE, T))
        if mask is not None:
            mask_row = mask + sequence * MASK_STRIDE[0] + token.to(tl.int64) * MASK_STRIDE[1]
            visible = visible & (tl.load(mask_row + position.to(tl.int64) * MASK_STRIDE[2], mask=visible, other=0) != 0)
        code = tl.where(visible, order_code(score), 0).to(tl.int32, bitcast=True)
        tl.store(codes + (sequence * S + token) * T + position, code, mask=position < reach)


@triton.jit
def load_codes(row, start, limit, BLOCK: tl.constexpr):
    """A tile of a row of codes; positions at or after ``limit``, which nobody wrote, read as hidden."""
    position = start + tl.arange(0, BLOCK)
    return tl.load(row + position, mask=position < limit, other=0).to(tl.uint32, bitcast=True)


@triton.jit
def threshold_code(row, limit, K: tl.constexpr, BLOCK: tl.constexpr):
    """The last winner's code, and how many keys of just that code win: a search from the top, 8 bits a pass.

    Needs K < ``limit``. Hidden keys and lanes past the row count as code 0, the last to be chosen: the threshold is 0
    if fewer than K keys are visible, and then the number of ties is not meant.
    """
    digit = tl.arange(0, 256)
    prefix = tl.full([], 0, tl.uint32)
    wanted = tl.full([], K, tl.int32)
    for step in range(4):
        shift = 24 - 8 * step
        counts = tl.zeros([256], tl.int32)
        for start in range(0, limit, BLOCK):
            high = load_codes(row, start, limit, BLOCK) >> shift
            counts += tl.histogram((high & 255).to(tl.int32), 256, mask=(high >> 8) == prefix)
        at_least = tl.cumsum(counts, 0, reverse=True)
        chosen = tl.sum((at_least >= wanted).to(tl.int32)) - 1
        wanted -= tl.sum(tl.where(digit > chosen, counts, 0))
        prefix = (prefix << 8) | chosen.to(tl.uint32)
    return prefix, wanted


@triton.jit
def select_row(
    codes,
    lengths,
    block_table,
    picked,
    S: tl.constexpr,
    T: tl.constexpr,
    K: tl.constexpr,
    LENGTH_STRIDE: tl.constexpr,
    TABLE_STRIDE: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One query row: the set of the first K visible keys by (code descending, index ascending), ascending, then -1."""
    index = tl.program_id(0)
    limit = visible_limit(lengths, (index // S).to(tl.int64), index % S, LENGTH_STRIDE, T)
    row = codes + index.to(tl.int64) * T
    out = picked + index.to(tl.int64) * K
    threshold = tl.full([], 0, tl.uint32)
    ties = tl.full([], 0, tl.int32)
    if limit > K:
        threshold, ties = threshold_code(row, limit, K, BLOCK)
    above_before = tl.full([], 0, tl.int32)
    equal_before = tl.full([], 0, tl.int32)
    for start in range(0, limit, BLOCK):
        code = load_codes(row, start, limit, BLOCK)
        above = (code > threshold).to(tl.int32)
        equal = ((code == threshold) & (code != 0)).to(tl.int32)
        # Both running counts in one scan: BLOCK is below 2 ** 15.
        running = tl.cumsum((above << 16) | equal, 0)
        above_rank = above_before + (running >> 16)
        equal_rank = equal_before + (running & 0xFFFF)
        wins = (above != 0) | ((equal != 0) & (equal_rank <= ties))
        slot = above_rank + tl.minimum(equal_rank, ties) - 1
        position = start + tl.arange(0, BLOCK)
        listed = listed_id(position, wins, block_table, (index // S).to(tl.int64), TABLE_STRIDE, PAGE, ROWS)
        tl.store(out + slot, listed, mask=wins)
        above_before += tl.sum(above)
        equal_before += tl.sum(equal)
    listed = above_before + tl.minimum(equal_before, ties)
    for start in range(0, K, BLOCK):
        slot = start + tl.arange(0, BLOCK)
        tl.store(out + slot, tl.full([BLOCK], -1, tl.int32), mask=(slot >= listed) & (slot < K))


def launch(q, keys, weights, lengths=None, mask=None, block_table=None, q_scales=None, *, memory=torch):
    """The operator's tensors in schema order -> int32 [B, S, k]; so many rows of each sequence at a time as S says."""
    picked = memory.empty(CONSTANTS["picked"], dtype=torch.int32, device=q.device)
    codes = memory.empty(CONSTANTS["codes"], dtype=torch.int32, device=q.device)
    if q.dtype == torch.float8_e4m3fn:
        q = q.view(torch.uint8)
    tokens, each = q.shape[1], CONSTANTS["score_keys"]["S"]
    if tokens == each:
        score_and_select(q, keys, weights, lengths, mask, block_table, q_scales, codes, picked)
        return picked
    part = memory.empty(picked[:, :each].shape, dtype=torch.int32, device=q.device)
    for start in (*range(0, tokens - each, each), tokens - each):
        rows = slice(start, start + each)
        seen = None
        if lengths is not None:
            seen = torch.add(lengths, start, out=memory.empty(lengths.shape, dtype=lengths.dtype, device=q.device))
        masked = mask if mask is None or mask.dim() < 2 or mask.shape[-2] == 1 else mask[..., rows, :]
        scales = None if q_scales is None else q_scales[:, rows]
        score_and_select(q[:, rows], keys, weights[:, rows], seen, masked, block_table, scales, codes, part)
        picked[:, rows] = part
    return picked


def score_and_select(q, keys, weights, lengths, mask, block_table, q_scales, codes, picked):
    """Both launches for some rows of all sequences."""
    score, select = CONSTANTS["score_keys"], CONSTANTS["select_row"]
    if INTERPRET:
        # The interpreter's products of 16-bit floats are wrong (bf16) or rounded (fp16).
        score = {**score, "UPCAST": True, "INTERPRET": True}
    score_keys[CONSTANTS["score_grid"]](
        q, keys, weights, lengths, mask, block_table, q_scales, codes, **score, **CONSTANTS["score_options"]
    )
    select_row[CONSTANTS["select_grid"]](codes, lengths, block_table, picked, **select, **CONSTANTS["select_options"])
