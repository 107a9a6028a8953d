# pyright: basic, reportAssignmentType=false, reportGeneralTypeIssues=false
# Kernel text: inside @triton.jit, names are tensors of a language that type checkers do not know.
"""Lightning Indexer and exact top k in one launch: SPLITS programs a query row, which meet twice.

Each program scores its slice of the keys, page by page through the tensor memory accelerator, and counts the scores in
the row's histogram. Once all have, everybody finds the bin of the k-th score and collects what lies in it; once all
have, everybody knows the exact threshold and where its own winners go. The programs of a row must run at once, hence
the cooperative launch. With STAGE >= 0 a launch does one step between two meetings, which is how the interpreter, that
runs programs one after another, goes through the same code.
"""

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton import knobs
from triton.tools.tensor_descriptor import TensorDescriptor

from kimigraph.codegen.templates.index_selection import (
    bin_of_rank,
    bin_range,
    collect_slice,
    count_codes,
    count_slice,
    first_step,
    list_slice,
    narrow_range,
    settle,
)
from kimigraph.codegen.templates.meeting import after_all_threads, meet, row_state
from kimigraph.codegen.templates.order_code import order_code

INTERPRET = knobs.runtime.interpret
CONSTANTS: dict[str, Any] = {}


@triton.jit
def page_entry(
    block_table, sequence, page, limit_pages, T: tl.constexpr, TABLE_STRIDE: tl.constexpr, PAGED: tl.constexpr
):
    """Which page of 64 rows holds logical page ``page``: below 0 where none does. Past the last page: the last one."""
    page = tl.maximum(tl.minimum(page, limit_pages - 1), 0)
    if PAGED:
        entry = tl.load(block_table + sequence * TABLE_STRIDE[0] + page.to(tl.int64) * TABLE_STRIDE[1]).to(tl.int32)
    else:
        entry = sequence.to(tl.int32) * (T // 64) + page
    return entry


@triton.jit
def page_keys(keys_or_tiles, entry, QUANTISED: tl.constexpr, INTERPRET: tl.constexpr):
    """[64, 128] keys of a page."""
    entry = tl.maximum(entry, 0)
    if INTERPRET:
        slot = tl.arange(0, 64)[:, None] * 128 + tl.arange(0, 128)[None, :]
        if QUANTISED:
            place = keys_or_tiles.to(tl.pointer_type(tl.float8e4nv)) + entry.to(tl.int64) * 8448 + slot
        else:
            place = keys_or_tiles + entry.to(tl.int64) * 8192 + slot
        tile = tl.load(place).to(tl.float32)
    else:
        # A quantised page is 66 rows of 128 bytes: its keys, then their scales.
        tile = keys_or_tiles.load([entry * (66 if QUANTISED else 64), 0])
    return tile


@triton.jit
def page_scales(keys, entry, QUANTISED: tl.constexpr):
    """The fp32 scales of a page's keys, or ones."""
    if QUANTISED:
        scales = keys.to(tl.pointer_type(tl.float32)) + tl.maximum(entry, 0).to(tl.int64) * 2112 + 2048
        loaded = tl.load(scales + tl.arange(0, 64))
    else:
        loaded = tl.full([64], 1.0, tl.float32)
    return loaded


@triton.jit
def page_codes(tile, query, weight, scales):
    """Order codes of the scores of a page's keys; a NaN reaches the sum."""
    dots = tl.dot(tile, query, input_precision="ieee")
    weighted = tl.maximum(dots, 0.0, propagate_nan=tl.PropagateNan.ALL) * weight[None, :]
    return order_code(tl.sum(weighted, 1) * scales)


@triton.jit
def keep_page(codes, code, entry, page, limit, last_page):
    """Store a page's codes, hidden ones as 0."""
    position = page * 64 + tl.arange(0, 64)
    code = tl.where((position < limit) & (entry >= 0), code, 0)
    tl.store(codes + position, code.to(tl.int32, bitcast=True), mask=(position < limit) & (page < last_page))


@triton.jit
def keep_anchor(anchor, threshold):
    """The exponent of the last winner's score is where the row's next histogram is centred; any would be right.

    It rises at once and falls by one a launch: a lone score near 0 must not move the window.
    """
    magnitude = tl.where(threshold >= 0x80000000, threshold - 0x80000000, 0x7FFFFFFF - threshold)
    exponent = (magnitude >> 23).to(tl.int32)
    if (threshold > 0) & (exponent > 0) & (exponent < 255):
        tl.store(anchor, tl.maximum(exponent, tl.load(anchor) - 1))


@triton.jit
def score_pages(
    tiles, keys, block_table, sequence, page, last_page, pages, limit, query, weight, codes, histogram, first, gate,
    T: tl.constexpr, TABLE_STRIDE: tl.constexpr, PAGED: tl.constexpr, QUANTISED: tl.constexpr, STEP: tl.constexpr,
    INTERPRET: tl.constexpr,
):  # fmt: skip
    """Score pages ``page`` to ``last_page``, STEP (1 or 2) at once, and count the codes from bin ``gate`` on.

    Scales feed no product, so that nothing but this loop loads them ahead: by one step, which keeps the loop's own
    pipelining. Codes are counted from memory, which spreads them over the threads, one each.
    """
    entry_a = page_entry(block_table, sequence, page, pages, T, TABLE_STRIDE, PAGED)
    entry_b = page_entry(block_table, sequence, page + 1, pages, T, TABLE_STRIDE, PAGED)
    scales_a = page_scales(keys, entry_a, QUANTISED)
    scales_b = page_scales(keys, entry_b, QUANTISED)
    for now in range(page, last_page, STEP):
        entry_a = page_entry(block_table, sequence, now, pages, T, TABLE_STRIDE, PAGED)
        tile_a = page_keys(tiles, entry_a, QUANTISED, INTERPRET)
        here_a = scales_a
        next_a = page_entry(block_table, sequence, now + STEP, pages, T, TABLE_STRIDE, PAGED)
        scales_a = page_scales(keys, next_a, QUANTISED)
        if STEP == 2:
            entry_b = page_entry(block_table, sequence, now + 1, pages, T, TABLE_STRIDE, PAGED)
            tile_b = page_keys(tiles, entry_b, QUANTISED, INTERPRET)
            here_b = scales_b
            next_b = page_entry(block_table, sequence, now + 3, pages, T, TABLE_STRIDE, PAGED)
            scales_b = page_scales(keys, next_b, QUANTISED)
        code_a = page_codes(tile_a, query, weight, here_a)
        if STEP == 2:
            code_b = page_codes(tile_b, query, weight, here_b)
        keep_page(codes, code_a, entry_a, now, limit, last_page)
        if STEP == 2:
            keep_page(codes, code_b, entry_b, now + 1, limit, last_page)
        stored = now if INTERPRET else after_all_threads(now)
        position = stored * 64 + tl.arange(0, STEP * 64)
        count_codes(codes, position, tl.minimum(last_page * 64, limit), histogram, first, gate, INTERPRET)


@triton.jit
def index_and_select(
    tiles, q, keys, weights, lengths, block_table, codes, candidates, counts, state, picked,
    S: tl.constexpr, T: tl.constexpr, H: tl.constexpr, K: tl.constexpr, SCALE: tl.constexpr,
    Q_STRIDE: tl.constexpr, WEIGHT_STRIDE: tl.constexpr, LENGTH_STRIDE: tl.constexpr, TABLE_STRIDE: tl.constexpr,
    PAGED: tl.constexpr, QUANTISED: tl.constexpr, SPLITS: tl.constexpr, MOST: tl.constexpr, TILE: tl.constexpr,
    ONE: tl.constexpr, SEGMENTS: tl.constexpr, STEP: tl.constexpr, STATE: tl.constexpr, STAGE: tl.constexpr,
    INTERPRET: tl.constexpr,
):  # fmt: skip
    """One slice of one query row. ``state`` holds STATE words a row: counters and histograms, zero between launches."""
    ALL: tl.constexpr = STAGE < 0
    LEVELS: tl.constexpr = STAGE if STAGE >= 0 and STAGE < 4 else 4
    split = tl.program_id(0) % SPLITS
    row = (tl.program_id(0) // SPLITS).to(tl.int64)
    sequence = row // S
    token = row % S
    codes += row * T
    candidates += row * (2 * MOST)
    counts += row * (2 * SPLITS)
    state += row * STATE
    arrivals = state
    candidate_count = state + 32
    anchor = state + 64
    histogram = state + 128
    out = picked + row * K
    limit = tl.full([], T, tl.int64)
    if lengths is not None:
        limit = tl.minimum(tl.load(lengths + sequence * LENGTH_STRIDE).to(tl.int64) + token, T)
    limit = tl.maximum(limit, 0).to(tl.int32)
    pages = tl.cdiv(limit, 64)
    each = tl.cdiv(pages, SPLITS)
    page = split * each
    last_page = tl.minimum(page + each, pages)
    low = page * 64
    high = tl.minimum(last_page * 64, limit)
    first = first_step(anchor)
    if ALL or STAGE == 0:
        head = tl.arange(0, H)
        channel = tl.arange(0, 128)
        q_row = q + sequence * Q_STRIDE[0] + token * Q_STRIDE[1]
        query = tl.load(q_row + head[None, :] * Q_STRIDE[2] + channel[:, None] * Q_STRIDE[3])
        if INTERPRET:
            query = query.to(tl.float32)
        weight_row = weights + sequence * WEIGHT_STRIDE[0] + token * WEIGHT_STRIDE[1]
        weight = tl.load(weight_row + head * WEIGHT_STRIDE[2]).to(tl.float32) * SCALE
        # What a part of the slice has shown bounds the k-th score from below: the rest counts from there on.
        gate = tl.full([], 0, tl.int32)
        done = page
        for segment in range(0, SEGMENTS):
            if segment > 0:
                gate = tl.maximum(bin_of_rank(histogram, K)[0], 0)
            until = tl.minimum(page + (each >> (2 * (SEGMENTS - 1 - segment))), last_page)
            score_pages(
                tiles, keys, block_table, sequence, done, until, pages, limit, query, weight, codes, histogram, first,
                gate, T, TABLE_STRIDE, PAGED, QUANTISED, STEP, INTERPRET,
            )  # fmt: skip
            done = until
    begin = tl.full([], 1, tl.int64)
    end = tl.full([], 1, tl.int64)
    wanted = tl.full([], K, tl.int32)
    count = tl.full([], 0, tl.int32)
    levels = tl.full([], 1, tl.int32)
    if ALL:
        meet(arrivals, SPLITS)
    if ALL or STAGE > 0:
        bin, above, in_bin = bin_of_rank(histogram, K)
        # Too few visible keys: all win, which an empty range at the smallest code says.
        if bin >= 0:
            begin, end = bin_range(bin, first)
            wanted = K - above
            count = in_bin
        for level in range(1, LEVELS):
            if (count > MOST) & (end - begin > 1):
                if ALL:
                    count_slice(codes, low, high, histogram + level * 4096, begin, end, TILE, INTERPRET)
                    meet(arrivals, SPLITS)
                begin, end, wanted, count = narrow_range(histogram + level * 4096, begin, end, wanted)
                levels = level + 1
    if STAGE >= 1 and STAGE < 4:
        if (count > MOST) & (end - begin > 1):
            count_slice(codes, low, high, histogram + STAGE * 4096, begin, end, TILE, INTERPRET)
    if ALL or STAGE == 4:
        collect_slice(
            codes, low, high, begin, end, count, candidates, candidate_count, counts + split, counts + SPLITS + split,
            MOST, TILE,
        )  # fmt: skip
    if ALL:
        meet(arrivals, SPLITS)
    if ALL or STAGE == 5:
        threshold, ties, above_before, ties_before = settle(
            candidates, count, begin, wanted, counts, counts + SPLITS, low, split, MOST, SPLITS
        )
        list_slice(codes, low, high, threshold, ties, above_before, ties_before, out, TILE, ONE)
        if count == 0:
            # Fewer than K keys are visible: the rest of the row is -1.
            part = tl.arange(0, SPLITS)
            listed = tl.sum(tl.load(counts + part, cache_modifier=".cg"), 0)
            for start in range(split * 128, K, SPLITS * 128):
                slot = start + tl.arange(0, 128)
                tl.store(out + slot, tl.full([128], -1, tl.int32), mask=(slot >= listed) & (slot < K))
    if ALL:
        if split == 0:
            keep_anchor(anchor, threshold)
            tl.store(candidate_count, 0)
        WORDS: tl.constexpr = 4096 // SPLITS
        for level in range(0, levels):
            word = level * 4096 + split * WORDS + tl.arange(0, WORDS)
            tl.store(histogram + word, tl.zeros([WORDS], tl.int32))


@cache
def states(device):
    """The counters and histograms of ``meeting.row_state``."""
    del device
    return {}


def launch(q, keys, weights, lengths=None, mask=None, block_table=None, q_scales=None, *, memory=torch):
    """The operator's tensors in schema order -> int32 [B, S, k]."""
    del mask
    scratch = {"dtype": torch.int32, "device": q.device}
    names = ("codes", "candidates", "counts", "picked")
    codes, candidates, counts, picked = (memory.empty(CONSTANTS[name], **scratch) for name in names)
    state = (
        torch.zeros(CONSTANTS["state"], **scratch)
        if INTERPRET
        else row_state(states(q.device), CONSTANTS["state"], q.device)
    )
    operands = (q, keys, weights, lengths, block_table, codes, candidates, counts, state, picked)
    constants, grid = CONSTANTS["index_and_select"], CONSTANTS["grid"]
    if INTERPRET:
        for stage in range(6):
            index_and_select[grid](keys, *operands, **{**constants, "STAGE": stage, "INTERPRET": True})
        return picked
    rows = keys.view(-1, 128)
    rows = rows.view(torch.float8_e4m3fn) if constants["QUANTISED"] else rows
    tiles = TensorDescriptor(rows, list(rows.shape), [128, 1], [64, 128])
    index_and_select[grid](tiles, *operands, **constants, **CONSTANTS["options"])
    return picked
