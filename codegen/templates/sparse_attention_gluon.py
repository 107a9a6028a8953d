# pyright: basic, reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false
# Kernel text: inside @gluon.jit, names are tensors and constants of a language whose types say little to a checker.
"""Absorbed MLA attention of 512 + 64 columns over cache rows in one launch of specialised warps on Hopper.

A program takes a part of the rows of one query token for 64 heads. Some of its warps gather rows, 64 at a time, and
write them as bf16 to shared memory; four compute logits, weights and the first 256 columns of the result, four others
the last 256. Programs that share a query token join their parts; they must run at once, hence the cooperative launch.
"""

from functools import cache
from typing import Any

import torch
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from kimigraph.codegen.templates.cache_rows import cache_parts
from kimigraph.codegen.templates.cache_supply_gluon import supply_rows
from kimigraph.codegen.templates.meeting import meet, row_state

CONSTANTS: dict[str, Any] = {}


@gluon.jit
def load_query(q_row, first_head, first: gl.constexpr, COLUMNS: gl.constexpr, H: gl.constexpr, STRIDE: gl.constexpr):
    """[64, COLUMNS] of the queries; zeros past the last head."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 16], [8, 4], [gl.num_warps(), 1], [1, 0])
    head = first_head + gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT))
    column = first + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, LAYOUT))
    return gl.load(
        q_row + (gl.expand_dims(head * STRIDE, 1) + gl.expand_dims(column, 0)),
        mask=gl.expand_dims(head < H, 1),
        other=0.0,
    )


@gluon.jit
def new_signal():
    """A barrier in shared memory that one arrival completes."""
    signal = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(signal, count=1)
    return signal


@gluon.jit
def weigh_rows(
    q_row, turn_row, queries, tiles, weights, results, sink, first_head, steps, group, row, part,
    H: gl.constexpr, Q_STRIDE: gl.constexpr, TURN_STRIDE: gl.constexpr, SCALE: gl.constexpr, SPLITS: gl.constexpr,
    ROWS: gl.constexpr,
):  # fmt: skip
    """Logits and the online softmax (base 2) of 64 heads, and the first half of the result."""
    q_left, q_right, q_turned = queries
    left, right, turned, shown, ready, free = tiles
    share, factor, signals = weights
    q_ready, weighed, taken, spoken, met = signals
    LOGITS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    MIXED: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])
    HEADS: gl.constexpr = gl.SliceLayout(1, LOGITS)
    q_left.store(load_query(q_row, first_head, 0, 256, H, Q_STRIDE))
    q_turned.store(load_query(turn_row, first_head, 0, 64, H, TURN_STRIDE))
    fence_async_shared()
    tl.debug_barrier()
    mbarrier.wait(q_ready, 0)
    peak = gl.full([64], -1e30, gl.float32, layout=HEADS)
    total = gl.full([64], 0.0, gl.float32, layout=HEADS)
    mixed = gl.full([64, 256], 0.0, gl.float32, layout=MIXED)
    for step in range(steps):
        stage = step & 1
        mbarrier.wait(ready.index(stage), (step >> 1) & 1)
        logit = gl.full([64, ROWS], 0.0, gl.float32, layout=LOGITS)
        logit = warpgroup_mma(q_left, left.index(stage).permute((1, 0)), logit, is_async=True)
        logit = warpgroup_mma(q_right, right.index(stage).permute((1, 0)), logit, is_async=True)
        logit = warpgroup_mma(q_turned, turned.index(stage).permute((1, 0)), logit, is_async=True)
        hidden = shown.index(stage).load(gl.SliceLayout(0, LOGITS))
        logit = warpgroup_mma_wait(0, deps=[logit])
        logit = logit * (SCALE * 1.4426950408889634) + gl.expand_dims(hidden, 0)
        new_peak = gl.maximum(peak, gl.max(logit, 1))
        shrink = gl.exp2(peak - new_peak)
        weight = gl.exp2(logit - gl.expand_dims(new_peak, 1))
        narrow = weight.to(gl.bfloat16)
        mbarrier.wait(taken, (step & 1) ^ 1)
        share.store(narrow)
        factor.store(shrink)
        fence_async_shared()
        tl.debug_barrier()
        mbarrier.arrive(weighed, count=1)
        mixed = mixed * gl.expand_dims(gl.convert_layout(shrink, gl.SliceLayout(1, MIXED)), 1)
        operand = gl.convert_layout(narrow, gl.DotOperandLayout(0, MIXED, 2))
        mixed = warpgroup_mma(operand, left.index(stage), mixed, is_async=True)
        total = total * shrink + gl.sum(weight, 1)
        peak = new_peak
        mixed = warpgroup_mma_wait(0, deps=[mixed])
        mbarrier.arrive(free.index(stage), count=1)
    inverse = finish_softmax(total, peak, sink, results, first_head, group, row, part, H, SPLITS, HEADS)
    mbarrier.wait(taken, (steps & 1) ^ 1)
    factor.store(inverse)
    tl.debug_barrier()
    mbarrier.arrive(weighed, count=1)
    inverse = gl.convert_layout(inverse, gl.SliceLayout(1, MIXED))
    store_half(mixed, inverse, results, first_head, group, row, part, 0, H, SPLITS)
    if SPLITS > 1:
        mbarrier.wait(spoken, 0)
        meet(results[4] + group * 32, SPLITS)
        tl.debug_barrier()
        mbarrier.arrive(met, count=1)
        join_half(results, sink, group, row, first_head, part, 0, H, SPLITS)


@gluon.jit
def mix_rows(
    q_row, queries, tiles, weights, results, sink, first_head, steps, group, row, part,
    H: gl.constexpr, Q_STRIDE: gl.constexpr, SPLITS: gl.constexpr,
):  # fmt: skip
    """The second half of the result, by the weights that other warps make."""
    q_right, right, free = queries[1], tiles[1], tiles[5]
    share, factor, signals = weights
    q_ready, weighed, taken, spoken, met = signals
    MIXED: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])
    q_right.store(load_query(q_row, first_head, 256, 256, H, Q_STRIDE))
    fence_async_shared()
    tl.debug_barrier()
    mbarrier.arrive(q_ready, count=1)
    mixed = gl.full([64, 256], 0.0, gl.float32, layout=MIXED)
    for step in range(steps):
        stage = step & 1
        mbarrier.wait(weighed, step & 1)
        shrink = gl.expand_dims(factor.load(gl.SliceLayout(1, MIXED)), 1)
        mixed = warpgroup_mma(share, right.index(stage), mixed * shrink, is_async=True)
        mixed = warpgroup_mma_wait(0, deps=[mixed])
        mbarrier.arrive(taken, count=1)
        mbarrier.arrive(free.index(stage), count=1)
    mbarrier.wait(weighed, steps & 1)
    inverse = factor.load(gl.SliceLayout(1, MIXED))
    store_half(mixed, inverse, results, first_head, group, row, part, 256, H, SPLITS)
    if SPLITS > 1:
        tl.debug_barrier()
        mbarrier.arrive(spoken, count=1)
        mbarrier.wait(met, 0)
        join_half(results, sink, group, row, first_head, part, 256, H, SPLITS)


@gluon.jit
def finish_softmax(
    total, peak, sink, results, first_head, group, row, part, H: gl.constexpr, SPLITS: gl.constexpr,
    HEADS: gl.constexpr,
):  # fmt: skip
    """Write the log-sum-exp, of the whole or of this program's part; what the result has to be multiplied by."""
    seen = total > 0.0
    lse = gl.where(seen, peak + gl.log2(total), float("-inf"))
    within = gl.arange(0, 64, layout=HEADS)
    head = first_head + within
    if SPLITS == 1:
        gl.store(results[1] + row * H + head, lse * 0.6931471805599453, mask=head < H)
        total = with_sink(total, peak, sink, head, H)
    else:
        gl.store(results[3] + (group * SPLITS + part) * 64 + within, lse)
    return gl.where(seen, 1.0 / total, 0.0)


@gluon.jit
def with_sink(total, peak, sink, head, H: gl.constexpr):
    """The sum of weights relative to ``peak`` (base 2), with a sink's added."""
    if sink is not None:
        logit = gl.load(sink + head, mask=head < H, other=float("-inf")).to(gl.float32)
        total = total + gl.exp2(logit * 1.4426950408889634 - peak)
    return total


@gluon.jit
def store_half(
    mixed, inverse, results, first_head, group, row, part, first: gl.constexpr, H: gl.constexpr, SPLITS: gl.constexpr
):
    """Write 256 columns of the result, or of this program's part of it."""
    LAYOUT: gl.constexpr = mixed.type.layout
    within = gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT))
    column = gl.expand_dims(first + gl.arange(0, 256, layout=gl.SliceLayout(0, LAYOUT)), 0)
    value = mixed * gl.expand_dims(inverse, 1)
    if SPLITS == 1:
        out = results[0]
        place = out + (row * H + first_head) * 512 + (gl.expand_dims(within * 512, 1) + column)
        gl.store(place, value.to(out.dtype.element_ty), mask=gl.expand_dims(first_head + within < H, 1))
    else:
        parts = results[2]
        place = parts + (group * SPLITS + part) * 32768 + (gl.expand_dims(within * 512, 1) + column)
        gl.store(place, value.to(parts.dtype.element_ty))


@gluon.jit
def join_half(results, sink, group, row, first_head, part, first: gl.constexpr, H: gl.constexpr, SPLITS: gl.constexpr):
    """Weigh all parts of 64 / SPLITS heads, each thread all parts of its columns; other programs wrote them."""
    out, out_lse, parts, part_lse = results[0], results[1], results[2], results[3]
    EACH: gl.constexpr = 64 // SPLITS
    ACROSS: gl.constexpr = min(EACH, 4)
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 1, ACROSS], [1, 1, 32], [1, ACROSS, 4 // ACROSS], [2, 1, 0])
    ROWS: gl.constexpr = gl.SliceLayout(2, LAYOUT)
    HEADS: gl.constexpr = gl.SliceLayout(0, ROWS)
    within = part * EACH + gl.arange(0, EACH, layout=HEADS)
    source = group * SPLITS + gl.arange(0, SPLITS, layout=gl.SliceLayout(1, ROWS))
    source = gl.expand_dims(source * 64, 1) + gl.expand_dims(within, 0)
    lse = gl.load(part_lse + source, cache_modifier=".cg")
    COLUMNS: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(0, LAYOUT))
    across = gl.expand_dims(gl.expand_dims(first + gl.arange(0, 128, layout=COLUMNS), 0), 0)
    place = parts + (gl.expand_dims(source * 512, 2) + across)
    values = gl.load(place, cache_modifier=".cg")
    # A part that saw nothing has -inf, and so may all have.
    peak = gl.maximum(gl.max(lse, 0), -1e30)
    weight = gl.exp2(lse - gl.expand_dims(peak, 0))
    total = gl.sum(weight, 0)
    head = first_head + within
    if first == 0:
        natural = gl.where(total > 0.0, peak + gl.log2(total), float("-inf")) * 0.6931471805599453
        gl.store(out_lse + row * H + head, natural, mask=head < H)
    total = with_sink(total, peak, sink, head, H)
    weight = weight * gl.expand_dims(gl.where(total > 0.0, 1.0 / total, 0.0), 0)
    store_joined(values, weight, out, row, head, first, H)
    store_joined(gl.load(place + 128, cache_modifier=".cg"), weight, out, row, head, first + 128, H)


@gluon.jit
def store_joined(values, weight, out, row, head, first: gl.constexpr, H: gl.constexpr):
    """The weighted sum of all parts of 128 columns."""
    result = gl.sum(values.to(gl.float32) * gl.expand_dims(weight, 2), 0)
    LAYOUT: gl.constexpr = result.type.layout
    head = gl.convert_layout(head, gl.SliceLayout(1, LAYOUT))
    column = first + gl.arange(0, 128, layout=gl.SliceLayout(0, LAYOUT))
    place = out + (gl.expand_dims((row * H + head) * 512, 1) + gl.expand_dims(column, 0))
    gl.store(place, result.to(out.dtype.element_ty), mask=gl.expand_dims(head < H, 1))


@gluon.jit
def attend_with_warps(
    q_latent, q_rope, latent, rope, scales, indices, block_table, sink, lengths, parts, part_lse, state, out, out_lse,
    S: gl.constexpr, H: gl.constexpr, K: gl.constexpr, CACHE: gl.constexpr, SCALE: gl.constexpr,
    Q_STRIDE: gl.constexpr, Q_ROPE_STRIDE: gl.constexpr, INDEX_STRIDE: gl.constexpr, LENGTH_STRIDE: gl.constexpr,
    SPLITS: gl.constexpr, SPLIT: gl.constexpr, SUPPLIERS: gl.constexpr, ROWS: gl.constexpr,
    REGISTERS: gl.constexpr,
):  # fmt: skip
    """One part of the rows of one query token for 64 heads, then 64 / SPLITS heads of all rows."""
    GROUPS: gl.constexpr = (H + 63) // 64
    part = gl.program_id(0) % SPLITS
    group = (gl.program_id(0) // SPLITS).to(gl.int64)
    row = group // GROUPS
    first_head = (group % GROUPS).to(gl.int32) * 64
    sequence = row // S
    token = row % S
    end = K
    share = SPLIT
    if lengths is not None:
        # Programs share what is visible, not what the cache could hold.
        end = gl.minimum(gl.load(lengths + sequence * LENGTH_STRIDE) + token, K).to(gl.int32)
        share = (gl.maximum(end, 0) + SPLITS * ROWS - 1) // (SPLITS * ROWS) * ROWS
    first = part * share
    limit = gl.minimum(first + share, end)
    steps = (gl.maximum(limit - first, 0) + ROWS - 1) // ROWS
    if indices is not None:
        indices = indices + (sequence * INDEX_STRIDE[0] + token * INDEX_STRIDE[1])
    TILE: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q_left = gl.allocate_shared_memory(gl.bfloat16, [64, 256], TILE)
    q_right = gl.allocate_shared_memory(gl.bfloat16, [64, 256], TILE)
    q_turned = gl.allocate_shared_memory(gl.bfloat16, [64, 64], TILE)
    left = gl.allocate_shared_memory(gl.bfloat16, [2, ROWS, 256], TILE)
    right = gl.allocate_shared_memory(gl.bfloat16, [2, ROWS, 256], TILE)
    turned = gl.allocate_shared_memory(gl.bfloat16, [2, ROWS, 64], TILE)
    shown = gl.allocate_shared_memory(gl.float32, [2, ROWS], LINE)
    WEIGHTS: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=ROWS * 2, element_bitwidth=16, rank=2)
    share = gl.allocate_shared_memory(gl.bfloat16, [64, ROWS], WEIGHTS)
    factor = gl.allocate_shared_memory(gl.float32, [64], LINE)
    ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(2):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(free.index(stage), count=2)
    signals = ()
    for _ in gl.static_range(5):
        signals = signals + (new_signal(),)
    tl.debug_barrier()
    q_row = q_latent + sequence * Q_STRIDE[0] + token * Q_STRIDE[1]
    turn_row = q_rope + sequence * Q_ROPE_STRIDE[0] + token * Q_ROPE_STRIDE[1]
    queries = (q_left, q_right, q_turned)
    tiles = (left, right, turned, shown, ready, free)
    weights = (share, factor, signals)
    results = (out, out_lse, parts, part_lse, state)
    HEAD_STRIDE: gl.constexpr = Q_STRIDE[2]
    TURN_STRIDE: gl.constexpr = Q_ROPE_STRIDE[2]
    PICK_STRIDE: gl.constexpr = INDEX_STRIDE[2]
    gl.warp_specialize(
        [
            (weigh_rows, (q_row, turn_row, queries, tiles, weights, results, sink, first_head, steps, group, row, part,
                          H, HEAD_STRIDE, TURN_STRIDE, SCALE, SPLITS, ROWS)),
            (mix_rows, (q_row, queries, tiles, weights, results, sink, first_head, steps, group, row, part,
                           H, HEAD_STRIDE, SPLITS)),
            (supply_rows, (latent, rope, scales, indices, block_table, sequence, first, limit, steps, tiles,
                           CACHE, PICK_STRIDE, ROWS)),
        ],
        [4, SUPPLIERS],
        [REGISTERS[0], REGISTERS[1]],
    )  # fmt: skip


@cache
def states(device):
    """The counters of ``meeting.row_state``."""
    del device
    return {}


def launch(q_latent, q_rope, latent, rope, rows, block_table=None, sink=None, *, memory=torch):
    """The operator's tensors in schema order -> (out [B, S, H, 512], lse fp32 [B, S, H]).

    ``rows`` are indices, or the lengths of the visible prefixes (or None) where all visible rows are attended to.
    """
    latent, rope, scales = cache_parts(latent, rope, CONSTANTS["columns"])
    fp32 = {"dtype": torch.float32, "device": q_latent.device}
    out = memory.empty(CONSTANTS["out"], dtype=q_latent.dtype, device=q_latent.device)
    lse, parts, part_lse = (memory.empty(CONSTANTS[name], **fp32) for name in ("lse", "parts", "part_lse"))
    constants, grid = CONSTANTS["attend_with_warps"], CONSTANTS["grid"]
    indices, lengths = (rows, None) if CONSTANTS["listed"] else (None, rows)
    state = None
    if constants["SPLITS"] > 1:
        state = row_state(states(q_latent.device), CONSTANTS["state"], q_latent.device)
    attend_with_warps[grid](
        q_latent, q_rope, latent, rope, scales, indices, block_table, sink, lengths, parts, part_lse, state, out, lse,
        **constants, **CONSTANTS["options"],
    )  # fmt: skip
    return out, lse
