# pyright: basic, reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false
# Kernel text: inside @gluon.jit, names are tensors and constants of a language whose types say little to a checker.
"""Scores of many query rows of one sequence, as order codes in memory: one warp fetches pages of 64 keys for twelve.

Each four of the twelve multiply a page with 128 / H query rows, and weigh the heads.
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper

from kimigraph.codegen.templates.order_code import order_code


@gluon.jit
def prompt_entry(block_table, sequence, page, T: gl.constexpr, TABLE_STRIDE: gl.constexpr):
    """Which page of 64 rows holds a logical page, below 0 where none does. Past the last page: the last one."""
    page = gl.minimum(page, (T + 63) // 64 - 1)
    if block_table is not None:
        entry = gl.load(block_table + page * TABLE_STRIDE).to(gl.int32)
    else:
        entry = sequence * (T // 64) + page
    return entry


@gluon.jit
def fetch_pages(
    tiles, scale_rows, block_table, buffers, scales, full, empty, sequence, first, count,
    T: gl.constexpr, TABLE_STRIDE: gl.constexpr, QUANTISED: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Fill the stages with ``count`` pages in turn, as they fall empty. Entries are read one page ahead."""
    BYTES: gl.constexpr = 64 * 132 if QUANTISED else 64 * 256
    next = prompt_entry(block_table, sequence, first, T, TABLE_STRIDE)
    for number in range(0, count):
        stage = number % STAGES
        entry = gl.maximum(next, 0)
        next = prompt_entry(block_table, sequence, first + number + 1, T, TABLE_STRIDE)
        hopper.mbarrier.wait(empty.index(stage), ((number // STAGES) & 1) ^ 1)
        arrived = full.index(stage)
        hopper.mbarrier.expect(arrived, BYTES)
        # A quantised page is 66 rows of 128 bytes: its keys, then their scales.
        hopper.tma.async_copy_global_to_shared(
            tiles, [entry * (66 if QUANTISED else 64), 0], arrived, buffers.index(stage)
        )
        if QUANTISED:
            place = scales.index(stage)._reinterpret(gl.float32, [1, 64], scale_rows.layout)
            hopper.tma.async_copy_global_to_shared(scale_rows, [entry, 2048], arrived, place)


@gluon.jit
def score_pages_of_rows(
    q, weights, block_table, codes, peaks, buffers, scales, query_tiles, full, empty, sequence, length, rows, token,
    split, first, count, WHICH: gl.constexpr,
    T: gl.constexpr, H: gl.constexpr, SCALE: gl.constexpr, Q_STRIDE: gl.constexpr, WEIGHT_STRIDE: gl.constexpr,
    TABLE_STRIDE: gl.constexpr, QUANTISED: gl.constexpr, SPLITS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Score the pages for the rows from ``token`` + WHICH * 128 / H on, as they come."""
    WARPS: gl.constexpr = gl.num_warps()
    PACK: gl.constexpr = 128 // H
    BITS: gl.constexpr = 8 if QUANTISED else 16
    EACH: gl.constexpr = 128 // BITS
    LOAD: gl.constexpr = gl.BlockedLayout([1, EACH], [32 * EACH // 128, 128 // EACH], [WARPS, 1], [1, 0])
    PRODUCT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, 128, 256 // BITS])
    token = token + WHICH * PACK
    # Rows past the last one repeat it and are not stored.
    column = gl.arange(0, 128, layout=gl.SliceLayout(1, LOAD))
    row = gl.minimum(token + column // H, rows - 1)
    channel = gl.expand_dims(gl.arange(0, 128, layout=gl.SliceLayout(0, LOAD)), 0)
    place = row.to(gl.int64) * Q_STRIDE[0] + (column % H) * Q_STRIDE[1]
    query_tile = query_tiles.index(WHICH)
    query_tile.store(gl.load(q + (gl.expand_dims(place, 1) + channel * Q_STRIDE[2])))
    column = gl.arange(0, 128, layout=gl.SliceLayout(0, PRODUCT))
    row = gl.minimum(token + column // H, rows - 1)
    place = row.to(gl.int64) * WEIGHT_STRIDE[0] + (column % H) * WEIGHT_STRIDE[1]
    # Halved where the positive part comes doubled.
    FACTOR: gl.constexpr = SCALE * 0.5 if QUANTISED else SCALE
    weight = gl.expand_dims(gl.load(weights + place).to(gl.float32) * FACTOR, 0)
    hopper.fence_async_shared()
    tl.debug_barrier()
    columns = query_tile.permute((1, 0))
    zeros = gl.zeros([64, 128], gl.float32, layout=PRODUCT)
    SCORES: gl.constexpr = gl.sum(gl.reshape(zeros, [64, PACK, H]), 2).type.layout
    index = gl.arange(0, 64, layout=gl.SliceLayout(1, SCORES))
    own = token + gl.arange(0, PACK, layout=gl.SliceLayout(0, SCORES))
    limit = gl.expand_dims(gl.minimum(length + own, T), 0)
    place = gl.expand_dims(own.to(gl.int64) * T, 0) + gl.expand_dims(index, 1)
    stored = gl.expand_dims(own < rows, 0) & (gl.expand_dims(index, 1) < 64)
    peak = gl.zeros([64, PACK], gl.int32, layout=SCORES)
    for number in range(0, count):
        stage = number % STAGES
        start = (first + number) * 64
        entry = prompt_entry(block_table, sequence, first + number, T, TABLE_STRIDE)
        hopper.mbarrier.wait(full.index(stage), (number // STAGES) & 1)
        dots = hopper.warpgroup_mma(buffers.index(stage), columns, zeros, use_acc=False, is_async=True)
        dots = hopper.warpgroup_mma_wait(0, deps=[dots])
        if QUANTISED:
            # Twice the positive part: additions have twice the rate of maxima, and e4m3 has no infinities.
            positive = dots + gl.abs(dots)
        else:
            positive = gl.maximum(dots, 0.0, propagate_nan=tl.PropagateNan.ALL)
        score = gl.sum(gl.reshape(positive * weight, [64, PACK, H]), 2)
        if QUANTISED:
            score = score * gl.expand_dims(scales.index(stage).load(gl.SliceLayout(1, SCORES)), 1)
        hopper.mbarrier.arrive(empty.index(stage), count=1)
        visible = (gl.expand_dims(start + index, 1) < limit) & (entry >= 0)
        code = gl.where(visible, order_code(score), 0)
        gl.store(codes + start + place, code.to(gl.int32, bitcast=True), mask=stored & (start + index < T)[:, None])
        bits = score.to(gl.int32, bitcast=True) & 0x7FFFFFFF
        peak = gl.maximum(peak, gl.where(bits <= 0x7F800000, bits, 0))
    gl.store(peaks + own * SPLITS + split, gl.max(peak, 0), mask=own < rows)


@gluon.jit
def score_prompt(
    tiles, scale_rows, q, weights, lengths, block_table, codes, peaks, sequence, rows,
    T: gl.constexpr, H: gl.constexpr, SCALE: gl.constexpr, Q_STRIDE: gl.constexpr, WEIGHT_STRIDE: gl.constexpr,
    TABLE_STRIDE: gl.constexpr, QUANTISED: gl.constexpr, SPLITS: gl.constexpr, STAGES: gl.constexpr,
    REGISTERS: gl.constexpr,
):  # fmt: skip
    """A part of the pages that three times 128 / H query rows see, the last rows first.

    ``lengths`` points at what the first of ``rows`` rows sees; ``peaks`` [rows, SPLITS] take the largest magnitudes.
    """
    TYPE: gl.constexpr = tiles.dtype
    KEYS: gl.constexpr = gl.NVMMASharedLayout(128, TYPE.primitive_bitwidth, rank=2)
    WORDS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    ROWS: gl.constexpr = 3 * (128 // H)
    split = gl.program_id(0) % SPLITS
    token = ((rows + ROWS - 1) // ROWS - 1 - gl.program_id(0) // SPLITS) * ROWS
    length = gl.to_tensor(T)
    if lengths is not None:
        length = gl.load(lengths).to(gl.int32)
    reach = gl.maximum(gl.minimum(length + gl.minimum(token + ROWS, rows) - 1, T), 0)
    pages = (reach + 63) // 64
    each = (pages + SPLITS - 1) // SPLITS
    first = gl.minimum(split * each, pages)
    count = gl.minimum(first + each, pages) - first
    buffers = gl.allocate_shared_memory(TYPE, [STAGES, 64, 128], KEYS)
    scales = gl.allocate_shared_memory(gl.float32, [STAGES, 64], WORDS)
    query_tiles = gl.allocate_shared_memory(TYPE, [3, 128, 128], KEYS)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], hopper.mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], hopper.mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        hopper.mbarrier.init(full.index(stage), count=1)
        hopper.mbarrier.init(empty.index(stage), count=3)
    tl.debug_barrier()
    gl.warp_specialize(
        [
            (score_pages_of_rows, (
                q, weights, block_table, codes, peaks, buffers, scales, query_tiles, full, empty, sequence, length,
                rows, token, split, first, count, 0,
                T, H, SCALE, Q_STRIDE, WEIGHT_STRIDE, TABLE_STRIDE, QUANTISED, SPLITS, STAGES,
            )),
            (score_pages_of_rows, (
                q, weights, block_table, codes, peaks, buffers, scales, query_tiles, full, empty, sequence, length,
                rows, token, split, first, count, 1,
                T, H, SCALE, Q_STRIDE, WEIGHT_STRIDE, TABLE_STRIDE, QUANTISED, SPLITS, STAGES,
            )),
            (score_pages_of_rows, (
                q, weights, block_table, codes, peaks, buffers, scales, query_tiles, full, empty, sequence, length,
                rows, token, split, first, count, 2,
                T, H, SCALE, Q_STRIDE, WEIGHT_STRIDE, TABLE_STRIDE, QUANTISED, SPLITS, STAGES,
            )),
            (fetch_pages, (
                tiles, scale_rows, block_table, buffers, scales, full, empty, sequence, first, count,
                T, TABLE_STRIDE, QUANTISED, STAGES,
            )),
        ],
        [4, 4, 1],
        [REGISTERS, REGISTERS, 24],
    )  # fmt: skip
