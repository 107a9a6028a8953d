# pyright: basic, reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false
# Kernel text: inside @gluon.jit, names are tensors and constants of a language whose types say little to a checker.
"""Scores of many query rows of one sequence, as order codes in memory: one warp fetches pages of 64 keys for others.

Each four of the others multiply a page with QUERIES / H query rows, and weigh the heads: twelve with 128 each, or eight
with 256, whose products read less shared memory.
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper

from kimigraph.codegen.templates.indexer_scores import magnitude
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
def from_lane(value, DISTANCE: gl.constexpr):
    """What the lane whose number differs in the bit ``DISTANCE`` holds."""
    SHUFFLE: gl.constexpr = (
        "shfl.sync.bfly.b32 $0, $1, 1, 31, -1;" if DISTANCE == 1 else "shfl.sync.bfly.b32 $0, $1, 2, 31, -1;"
    )
    return gl.inline_asm_elementwise(SHUFFLE, "=r,r", [value], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def quarters(products):
    """[64, 128] products of a warp group, of two tokens -> [64, 2, 4]: what each of the four lanes that share a row
    adds up by itself."""
    by_lane = gl.permute(gl.reshape(products, [64, 2, 8, 4, 2]), [0, 1, 3, 2, 4])
    return gl.sum(gl.reshape(by_lane, [64, 2, 4, 16]), 3)


@gluon.jit
def rows_of_pair(products, pair: gl.constexpr, PAIRS: gl.constexpr):
    """The products of one pair of rows of 64 heads, of one or two."""
    chosen = products
    if PAIRS == 2:
        first, second = gl.split(gl.permute(gl.reshape(products, [64, 2, 128]), [0, 2, 1]))
        chosen = first if pair == 0 else second
    return chosen


@gluon.jit
def keep_code(place, score, visible, there):
    """Store the codes of scores, 0 for hidden keys."""
    code = gl.where(visible, order_code(score), 0)
    gl.store(place, code.to(gl.int32, bitcast=True), mask=there)


@gluon.jit
def add_quarters(parts):
    """``quarters`` -> [128], one sum a thread: lane 4 e + l of warp w has row 16 w + e, 8 further on if l is odd, of
    the second token if l is 2 or 3."""
    halves = gl.permute(gl.reshape(parts, [4, 2, 8, 2, 4]), [0, 2, 4, 1, 3])
    first, second = gl.split(halves)
    first_low, first_high = gl.split(first)
    second_low, second_high = gl.split(second)
    THREADS: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    lane = gl.arange(0, 128, layout=THREADS) & 3
    first_low = gl.convert_layout(gl.reshape(first_low, [128]), THREADS)
    first_high = gl.convert_layout(gl.reshape(first_high, [128]), THREADS)
    second_low = gl.convert_layout(gl.reshape(second_low, [128]), THREADS)
    second_high = gl.convert_layout(gl.reshape(second_high, [128]), THREADS)
    odd = (lane & 1) != 0
    ours = gl.where(odd, first_high, first_low) + from_lane(gl.where(odd, first_low, first_high), 1)
    others = gl.where(odd, second_high, second_low) + from_lane(gl.where(odd, second_low, second_high), 1)
    upper = lane >= 2
    return gl.where(upper, others, ours) + from_lane(gl.where(upper, ours, others), 2)


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
    BY_QUARTERS: gl.constexpr, QUERIES: gl.constexpr,
):  # fmt: skip
    """Score the pages for the rows from ``token`` + WHICH * QUERIES / H on, as they come.

    BY_QUARTERS, for 64 heads: lanes that share a key trade parts of sums of two rows, so that each ends up with one
    score of one row and does what follows for that one alone.
    """
    WARPS: gl.constexpr = gl.num_warps()
    PACK: gl.constexpr = QUERIES // H
    BITS: gl.constexpr = 8 if QUANTISED else 16
    EACH: gl.constexpr = 128 // BITS
    LOAD: gl.constexpr = gl.BlockedLayout([1, EACH], [32 * EACH // 128, 128 // EACH], [WARPS, 1], [1, 0])
    PRODUCT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, QUERIES, 256 // BITS])
    token = token + WHICH * PACK
    # Rows past the last one repeat it and are not stored.
    column = gl.arange(0, QUERIES, layout=gl.SliceLayout(1, LOAD))
    row = gl.minimum(token + column // H, rows - 1)
    channel = gl.expand_dims(gl.arange(0, 128, layout=gl.SliceLayout(0, LOAD)), 0)
    place = row.to(gl.int64) * Q_STRIDE[0] + (column % H) * Q_STRIDE[1]
    query_tile = query_tiles.index(WHICH)
    query_tile.store(gl.load(q + (gl.expand_dims(place, 1) + channel * Q_STRIDE[2])))
    column = gl.arange(0, QUERIES, layout=gl.SliceLayout(0, PRODUCT))
    row = gl.minimum(token + column // H, rows - 1)
    place = row.to(gl.int64) * WEIGHT_STRIDE[0] + (column % H) * WEIGHT_STRIDE[1]
    # Halved where the positive part comes doubled.
    FACTOR: gl.constexpr = SCALE * 0.5 if QUANTISED else SCALE
    weight = gl.expand_dims(gl.load(weights + place).to(gl.float32) * FACTOR, 0)
    hopper.fence_async_shared()
    tl.debug_barrier()
    columns = query_tile.permute((1, 0))
    zeros = gl.zeros([64, QUERIES], gl.float32, layout=PRODUCT)
    if BY_QUARTERS:
        PAIRS: gl.constexpr = QUERIES // 128
        PARTS: gl.constexpr = quarters(rows_of_pair(zeros, 0, PAIRS)).type.layout
        thread = gl.arange(0, 128, layout=gl.BlockedLayout([1], [32], [4], [0]))
        index = (thread >> 5) * 16 + ((thread >> 2) & 7) + (thread & 1) * 8
        own = token + ((thread >> 1) & 1)
        peak = gl.zeros_like(index)
        second_peak = peak
    else:
        SCORES: gl.constexpr = gl.sum(gl.reshape(zeros, [64, PACK, H]), 2).type.layout
        index = gl.expand_dims(gl.arange(0, 64, layout=gl.SliceLayout(1, SCORES)), 1)
        own = token + gl.expand_dims(gl.arange(0, PACK, layout=gl.SliceLayout(0, SCORES)), 0)
        peak = gl.zeros([64, PACK], gl.int32, layout=SCORES)
    limit = length + own
    place = own.to(gl.int64) * T + index
    ahead = prompt_entry(block_table, sequence, first, T, TABLE_STRIDE)
    for number in range(0, count):
        stage = number % STAGES
        start = (first + number) * 64
        entry = ahead
        ahead = prompt_entry(block_table, sequence, first + number + 1, T, TABLE_STRIDE)
        hopper.mbarrier.wait(full.index(stage), (number // STAGES) & 1)
        dots = hopper.warpgroup_mma(buffers.index(stage), columns, zeros, use_acc=False, is_async=True)
        dots = hopper.warpgroup_mma_wait(0, deps=[dots])
        if QUANTISED:
            # Twice the positive part: additions have twice the rate of maxima, and e4m3 has no infinities.
            positive = dots + gl.abs(dots)
        else:
            positive = gl.maximum(dots, 0.0, propagate_nan=tl.PropagateNan.ALL)
        if BY_QUARTERS:
            products = positive * weight
            for pair in gl.static_range(PAIRS):
                parts = quarters(rows_of_pair(products, pair, PAIRS))
                if QUANTISED:
                    scale = scales.index(stage).load(gl.SliceLayout(1, gl.SliceLayout(2, PARTS)))
                    parts = parts * gl.expand_dims(gl.expand_dims(scale, 1), 2)
                score = add_quarters(parts)
                if pair == PAIRS - 1:
                    hopper.mbarrier.arrive(empty.index(stage), count=1)
                there = (own + 2 * pair < rows) & (start + index < T)
                visible = there & (start + index < limit + 2 * pair) & (entry >= 0)
                keep_code(codes + start + 2 * pair * T + place, score, visible, there)
                if pair == 0:
                    peak = gl.maximum(peak, magnitude(score))
                else:
                    second_peak = gl.maximum(second_peak, magnitude(score))
        else:
            score = gl.sum(gl.reshape(positive * weight, [64, PACK, H]), 2)
            if QUANTISED:
                score = score * gl.expand_dims(scales.index(stage).load(gl.SliceLayout(1, SCORES)), 1)
            hopper.mbarrier.arrive(empty.index(stage), count=1)
            there = (own < rows) & (start + index < T)
            visible = there & (start + index < limit) & (entry >= 0)
            keep_code(codes + start + place, score, visible, there)
            peak = gl.maximum(peak, magnitude(score))
    if BY_QUARTERS:
        for pair in gl.static_range(PAIRS):
            found = peak if pair == 0 else second_peak
            for which in gl.static_range(2):
                of_row = token + 2 * pair + which
                highest = gl.max(gl.where(own == token + which, found, 0), 0)
                gl.store(peaks + of_row * SPLITS + split, highest, mask=of_row < rows)
    else:
        highest = gl.max(peak, 0)
        OF_ROW: gl.constexpr = highest.type.layout
        own = token + gl.arange(0, PACK, layout=OF_ROW)
        gl.store(peaks + own * SPLITS + split, highest, mask=own < rows)


@gluon.jit
def score_prompt(
    tiles, scale_rows, q, weights, lengths, block_table, codes, peaks, sequence, rows,
    T: gl.constexpr, H: gl.constexpr, SCALE: gl.constexpr, Q_STRIDE: gl.constexpr, WEIGHT_STRIDE: gl.constexpr,
    TABLE_STRIDE: gl.constexpr, QUANTISED: gl.constexpr, SPLITS: gl.constexpr, STAGES: gl.constexpr,
    REGISTERS: gl.constexpr, BY_QUARTERS: gl.constexpr, QUERIES: gl.constexpr,
):  # fmt: skip
    """A part of the pages that three times 128 / H query rows see, or twice 256 / H, the last rows first.

    ``lengths`` points at what the first of ``rows`` rows sees; ``peaks`` [rows, SPLITS] take the largest magnitudes.
    """
    TYPE: gl.constexpr = tiles.dtype
    KEYS: gl.constexpr = gl.NVMMASharedLayout(128, TYPE.primitive_bitwidth, rank=2)
    WORDS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    CONSUMERS: gl.constexpr = 3 if QUERIES == 128 else 2
    ROWS: gl.constexpr = CONSUMERS * (QUERIES // H)
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
    query_tiles = gl.allocate_shared_memory(TYPE, [CONSUMERS, QUERIES, 128], KEYS)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], hopper.mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], hopper.mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        hopper.mbarrier.init(full.index(stage), count=1)
        hopper.mbarrier.init(empty.index(stage), count=CONSUMERS)
    tl.debug_barrier()
    if CONSUMERS == 3:
        gl.warp_specialize(
            [
                (score_pages_of_rows, (
                    q, weights, block_table, codes, peaks, buffers, scales, query_tiles, full, empty, sequence, length,
                    rows, token, split, first, count, 0,
                    T, H, SCALE, Q_STRIDE, WEIGHT_STRIDE, TABLE_STRIDE, QUANTISED, SPLITS, STAGES, BY_QUARTERS,
                    QUERIES,
                )),
                (score_pages_of_rows, (
                    q, weights, block_table, codes, peaks, buffers, scales, query_tiles, full, empty, sequence, length,
                    rows, token, split, first, count, 1,
                    T, H, SCALE, Q_STRIDE, WEIGHT_STRIDE, TABLE_STRIDE, QUANTISED, SPLITS, STAGES, BY_QUARTERS,
                    QUERIES,
                )),
                (score_pages_of_rows, (
                    q, weights, block_table, codes, peaks, buffers, scales, query_tiles, full, empty, sequence, length,
                    rows, token, split, first, count, 2,
                    T, H, SCALE, Q_STRIDE, WEIGHT_STRIDE, TABLE_STRIDE, QUANTISED, SPLITS, STAGES, BY_QUARTERS,
                    QUERIES,
                )),
                (fetch_pages, (
                    tiles, scale_rows, block_table, buffers, scales, full, empty, sequence, first, count,
                    T, TABLE_STRIDE, QUANTISED, STAGES,
                )),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (score_pages_of_rows, (
                    q, weights, block_table, codes, peaks, buffers, scales, query_tiles, full, empty, sequence, length,
                    rows, token, split, first, count, 0,
                    T, H, SCALE, Q_STRIDE, WEIGHT_STRIDE, TABLE_STRIDE, QUANTISED, SPLITS, STAGES, BY_QUARTERS,
                    QUERIES,
                )),
                (score_pages_of_rows, (
                    q, weights, block_table, codes, peaks, buffers, scales, query_tiles, full, empty, sequence, length,
                    rows, token, split, first, count, 1,
                    T, H, SCALE, Q_STRIDE, WEIGHT_STRIDE, TABLE_STRIDE, QUANTISED, SPLITS, STAGES, BY_QUARTERS,
                    QUERIES,
                )),
                (fetch_pages, (
                    tiles, scale_rows, block_table, buffers, scales, full, empty, sequence, first, count,
                    T, TABLE_STRIDE, QUANTISED, STAGES,
                )),
            ],
            [4, 1],
            [REGISTERS, 24],
        )  # fmt: skip
