# pyright: basic, reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false
# Kernel text: inside @gluon.jit, names are tensors and constants of a language whose types say little to a checker.
"""Scores of query rows over pages of 64 keys, as order codes in memory: one warp fetches pages, four multiply.

The programs of a row take its tiles (PAGES pages each) in turn, so that what a program fetches first does not depend on
the row's length, which it learns meanwhile.
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper

from kimigraph.codegen.templates.launch_order import bring_to_l2, let_next_launch_start, wait_for_earlier_launch
from kimigraph.codegen.templates.order_code import order_code


@gluon.jit
def tile_entries(
    block_table, sequence, page, T: gl.constexpr, TABLE_STRIDE: gl.constexpr, PAGED: gl.constexpr, PAGES: gl.constexpr
):
    """Which pages of 64 rows hold logical pages from ``page`` on, below 0 where none does; past the end the last."""
    entries = ()
    for number in gl.static_range(PAGES):
        logical = gl.minimum(page + number, T // 64 - 1)
        if PAGED:
            place = block_table + sequence * TABLE_STRIDE[0] + logical.to(gl.int64) * TABLE_STRIDE[1]
            entries = entries + (gl.load(place, cache_modifier=".cg").to(gl.int32),)
        else:
            entries = entries + (sequence.to(gl.int32) * (T // 64) + logical,)
    return entries


@gluon.jit
def row_limit(lengths, sequence, token, T: gl.constexpr, LENGTH_STRIDE: gl.constexpr):
    """How many keys a query row sees."""
    limit = gl.to_tensor(T)
    if lengths is not None:
        seen = gl.load(lengths + sequence * LENGTH_STRIDE, cache_modifier=".cg").to(gl.int64) + token
        limit = gl.maximum(gl.minimum(seen, T), 0).to(gl.int32)
    return limit


@gluon.jit
def tiles_of_split(limit, split, SPLITS: gl.constexpr, PAGES: gl.constexpr):
    """How many tiles a program of the row has; not above 0 if there are fewer tiles than programs."""
    tile_count = (limit + 64 * PAGES - 1) // (64 * PAGES)
    return (tile_count - split + SPLITS - 1) // SPLITS


@gluon.jit
def fetch(tiles, scale_rows, buffers, scales, full, stage, entries, live, QUANTISED: gl.constexpr, PAGES: gl.constexpr):
    """Start the copies of a tile's pages, and of their scales, into a stage; ``full`` counts their bytes."""
    BYTES: gl.constexpr = 64 * 132 if QUANTISED else 64 * 256
    buffer = buffers.index(stage)
    arrived = full.index(stage)
    hopper.mbarrier.expect(arrived, PAGES * BYTES, pred=live)
    for number in gl.static_range(PAGES):
        entry = gl.maximum(entries[number], 0)
        keys = buffer.slice(number * 64, 64)
        # A quantised page is 66 rows of 128 bytes: its keys, then their scales.
        hopper.tma.async_copy_global_to_shared(tiles, [entry * (66 if QUANTISED else 64), 0], arrived, keys, pred=live)
        if QUANTISED:
            place = scales.index(stage * PAGES + number)._reinterpret(gl.float32, [1, 64], scale_rows.layout)
            hopper.tma.async_copy_global_to_shared(scale_rows, [entry, 2048], arrived, place, pred=live)


@gluon.jit
def fetch_tiles(
    tiles, scale_rows, block_table, lengths, buffers, scales, full, empty, sequence, token, split,
    T: gl.constexpr, LENGTH_STRIDE: gl.constexpr, TABLE_STRIDE: gl.constexpr, PAGED: gl.constexpr,
    QUANTISED: gl.constexpr, SPLITS: gl.constexpr, PAGES: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Fill the stages with the program's tiles, in turn, as they fall empty. Entries are read two tiles ahead."""
    limit = row_limit(lengths, sequence, token, T, LENGTH_STRIDE)
    entries = ()
    for tile in gl.static_range(STAGES + 2):
        page = (split + tile * SPLITS) * PAGES
        entries = entries + (tile_entries(block_table, sequence, page, T, TABLE_STRIDE, PAGED, PAGES),)
    count = tiles_of_split(limit, split, SPLITS, PAGES)
    for stage in gl.static_range(STAGES):
        fetch(tiles, scale_rows, buffers, scales, full, stage, entries[stage], stage < count, QUANTISED, PAGES)
    next = entries[STAGES]
    after_next = entries[STAGES + 1]
    for number in range(0, count - STAGES):
        place = number % STAGES
        hopper.mbarrier.wait(empty.index(place), (number // STAGES) & 1)
        current = next
        next = after_next
        page_later = (split + (number + STAGES + 2) * SPLITS) * PAGES
        after_next = tile_entries(block_table, sequence, page_later, T, TABLE_STRIDE, PAGED, PAGES)
        fetch(tiles, scale_rows, buffers, scales, full, place, current, True, QUANTISED, PAGES)


@gluon.jit
def mapped(index, entries, PAGES: gl.constexpr):
    """Whether the rows of a tile lie in pages that are there."""
    there = (index >= 0) & (entries[0] >= 0)
    for number in gl.static_range(1, PAGES):
        there = gl.where(index >= number * 64, entries[number] >= 0, there)
    return there


@gluon.jit
def put_to_stay(place, value, live):
    """Store an int32 at each place that is ``live``, and have the L2 cache drop it late; four lanes hold the same."""
    gl.inline_asm_elementwise(
        """
        {
        .reg .pred live;
        .reg .b32 lane;
        .reg .b64 policy;
        mov.u32 lane, %laneid;
        and.b32 lane, lane, 3;
        setp.eq.u32 live, lane, 0;
        setp.ne.and.s32 live, $3, 0, live;
        createpolicy.fractional.L2::evict_last.b64 policy, 1.0;
        @live st.global.L2::cache_hint.b32 [$1], $2, policy;
        } // $0
        """,
        "=r,l,r,r",
        [place.to(gl.uint64, bitcast=True), value, live.to(gl.int32)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def largest_of_warp(code, before):
    """The largest of ``before`` and the codes of the 16 keys that a warp has multiplied, two of them in each thread."""
    return gl.inline_asm_elementwise(
        """
        {
        .reg .b32 larger;
        max.u32 larger, $2, $3;
        redux.sync.max.u32 larger, larger, 0xffffffff;
        max.u32 larger, larger, $4;
        mov.u32 $0, larger;
        mov.u32 $1, larger;
        } // $5
        """,
        "=&r,=&r,r,r,r,r",
        [code, before],
        dtype=gl.int32,
        is_pure=False,
        pack=2,
    )


@gluon.jit
def keep_codes(codes, position, score, visible, T: gl.constexpr, STAY: gl.constexpr):
    """Store and return the codes of a tile's scores, 0 for hidden keys. STAY: keys that stream by do not push them to
    memory."""
    code = gl.where(visible, order_code(score), 0).to(gl.int32, bitcast=True)
    if STAY:
        put_to_stay(codes + position, code, position < T)
    else:
        gl.store(codes + position, code, mask=position < T)
    return code


@gluon.jit
def magnitude(score):
    """The bits of a score's magnitude, 0 for NaN."""
    bits = score.to(gl.int32, bitcast=True) & 0x7FFFFFFF
    return gl.where(bits <= 0x7F800000, bits, 0)


@gluon.jit
def head_weights(weight_row, H: gl.constexpr, STRIDE: gl.constexpr, LAYOUT: gl.constexpr):
    """The weights of the heads, fp32. A warp reads each once: all programs of a row ask for the same two lines."""
    ONCE: gl.constexpr = gl.BlockedLayout([H // 32 if H > 32 else 1], [32], [gl.num_warps()], [0])
    heads = gl.arange(0, H, layout=ONCE)
    weight = gl.load(weight_row + heads * STRIDE, cache_modifier=".cg").to(gl.float32)
    return gl.convert_layout(weight, LAYOUT)


@gluon.jit
def score_tiles(
    q, weights, lengths, block_table, codes, tops, peaks, buffers, scales, query_tile, full, empty, row, sequence,
    token, split,
    T: gl.constexpr, H: gl.constexpr, SCALE: gl.constexpr, Q_STRIDE: gl.constexpr, WEIGHT_STRIDE: gl.constexpr,
    LENGTH_STRIDE: gl.constexpr, TABLE_STRIDE: gl.constexpr, PAGED: gl.constexpr, QUANTISED: gl.constexpr,
    SPLITS: gl.constexpr, PAGES: gl.constexpr, STAGES: gl.constexpr, STAY: gl.constexpr, TOP_TILES: gl.constexpr,
):  # fmt: skip
    """Score the tiles as they come."""
    WARPS: gl.constexpr = gl.num_warps()
    ROWS: gl.constexpr = PAGES * 64
    BITS: gl.constexpr = 8 if QUANTISED else 16
    EACH: gl.constexpr = 128 // BITS
    LOAD: gl.constexpr = gl.BlockedLayout([1, EACH], [32 * EACH // 128, 128 // EACH], [WARPS, 1], [1, 0])
    PRODUCT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, H, 256 // BITS])
    BY_KEY: gl.constexpr = gl.SliceLayout(1, PRODUCT)
    limit = row_limit(lengths, sequence, token, T, LENGTH_STRIDE)
    head = gl.expand_dims(gl.arange(0, H, layout=gl.SliceLayout(1, LOAD)), 1)
    channel = gl.expand_dims(gl.arange(0, 128, layout=gl.SliceLayout(0, LOAD)), 0)
    q_row = q + sequence * Q_STRIDE[0] + token * Q_STRIDE[1]
    query = gl.load(q_row + head * Q_STRIDE[2] + channel * Q_STRIDE[3], cache_modifier=".cg")
    weight_row = weights + sequence * WEIGHT_STRIDE[0] + token * WEIGHT_STRIDE[1]
    weight = gl.expand_dims(head_weights(weight_row, H, WEIGHT_STRIDE[2], gl.SliceLayout(0, PRODUCT)) * SCALE, 0)
    query_tile.store(query)
    hopper.fence_async_shared()
    tl.debug_barrier()
    columns = query_tile.permute((1, 0))
    codes += row * T
    index = gl.arange(0, ROWS, layout=BY_KEY)
    zeros = gl.zeros([ROWS, H], gl.float32, layout=PRODUCT)
    peak = gl.zeros([ROWS], gl.int32, layout=BY_KEY)
    ahead = tile_entries(block_table, sequence, split * PAGES, T, TABLE_STRIDE, PAGED, PAGES)
    top = peak
    TILES: gl.constexpr = (T + ROWS * SPLITS - 1) // (ROWS * SPLITS)
    GROUPS: gl.constexpr = (TILES + TOP_TILES - 1) // TOP_TILES
    count = tiles_of_split(limit, split, SPLITS, PAGES)
    for number in range(0, count):
        tile = split + number * SPLITS
        stage = number % STAGES
        entries = ahead
        ahead = tile_entries(block_table, sequence, (tile + SPLITS) * PAGES, T, TABLE_STRIDE, PAGED, PAGES)
        hopper.mbarrier.wait(full.index(stage), (number // STAGES) & 1)
        dots = hopper.warpgroup_mma(buffers.index(stage), columns, zeros, use_acc=False, is_async=True)
        dots = hopper.warpgroup_mma_wait(0, deps=[dots])
        # A NaN reaches the sum.
        score = gl.sum(gl.maximum(dots, 0.0, propagate_nan=tl.PropagateNan.ALL) * weight, 1)
        if QUANTISED:
            score = score * scales.index(stage).load(BY_KEY)
        hopper.mbarrier.arrive(empty.index(stage), count=1)
        visible = tile * ROWS + index < limit
        if PAGED:
            visible = visible & mapped(index, entries, PAGES)
        code = keep_codes(codes, tile * ROWS + index, score, visible, T, STAY)
        if tops is not None:
            top = largest_of_warp(code, top)
            full_group = (number % TOP_TILES == TOP_TILES - 1) | (number == count - 1)
            group = (row * GROUPS + number // TOP_TILES) * SPLITS + split
            gl.store(tops + group * (ROWS // 16) + index // 16, top, mask=(index % 16 == 0) & full_group)
            top = gl.where((index >= 0) & full_group, 0, top)
        peak = gl.maximum(peak, gl.where(visible, magnitude(score), 0))
    gl.store(peaks + row * SPLITS + split, gl.max(peak, 0))


@gluon.jit
def bring_inputs(
    lengths, block_table, sequence, split, T: gl.constexpr, LENGTH_STRIDE: gl.constexpr, TABLE_STRIDE: gl.constexpr,
    SPLITS: gl.constexpr,
):  # fmt: skip
    """Have the row's length and the program's table entries on their way: they decide which keys are fetched."""
    lane = gl.arange(0, 128, layout=gl.BlockedLayout([1], [32], [4], [0]))
    if lengths is not None:
        bring_to_l2(lengths + sequence * LENGTH_STRIDE + lane * 0, lane == 0)
    if block_table is not None:
        page = split + lane * SPLITS
        place = block_table + sequence * TABLE_STRIDE[0] + page.to(gl.int64) * TABLE_STRIDE[1]
        bring_to_l2(place, page < T // 64)


@gluon.jit
def score_rows(
    tiles, scale_rows, q, weights, lengths, block_table, codes, tops, peaks,
    S: gl.constexpr, T: gl.constexpr, H: gl.constexpr, SCALE: gl.constexpr,
    Q_STRIDE: gl.constexpr, WEIGHT_STRIDE: gl.constexpr, LENGTH_STRIDE: gl.constexpr, TABLE_STRIDE: gl.constexpr,
    PAGED: gl.constexpr, QUANTISED: gl.constexpr, SPLITS: gl.constexpr, PAGES: gl.constexpr, STAGES: gl.constexpr,
    STAY: gl.constexpr, TOP_TILES: gl.constexpr,
):  # fmt: skip
    """A program's tiles of one query row; the largest magnitude goes to ``peaks`` [rows, SPLITS], as bits. Where there
    are ``tops``, they take the largest code of each 16 keys of TOP_TILES tiles: [rows, groups, SPLITS, ROWS / 16]."""
    TYPE: gl.constexpr = tiles.dtype
    KEYS: gl.constexpr = gl.NVMMASharedLayout(128, TYPE.primitive_bitwidth, rank=2)
    WORDS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    split = gl.program_id(0) % SPLITS
    row = (gl.program_id(0) // SPLITS).to(gl.int64)
    sequence = row // S
    token = row % S
    buffers = gl.allocate_shared_memory(TYPE, [STAGES, PAGES * 64, 128], KEYS)
    scales = gl.allocate_shared_memory(gl.float32, [STAGES * PAGES, 64], WORDS)
    scales_by_tile = scales._reinterpret(gl.float32, [STAGES, PAGES * 64], WORDS)
    query_tile = gl.allocate_shared_memory(TYPE, [H, 128], KEYS)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], hopper.mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], hopper.mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        hopper.mbarrier.init(full.index(stage), count=1)
        hopper.mbarrier.init(empty.index(stage), count=1)
    let_next_launch_start()
    bring_inputs(lengths, block_table, sequence, split, T, LENGTH_STRIDE, TABLE_STRIDE, SPLITS)
    wait_for_earlier_launch()
    gl.warp_specialize(
        [
            (
                score_tiles,
                (
                    q, weights, lengths, block_table, codes, tops, peaks, buffers, scales_by_tile, query_tile, full,
                    empty, row, sequence, token, split,
                    T, H, SCALE, Q_STRIDE, WEIGHT_STRIDE, LENGTH_STRIDE, TABLE_STRIDE, PAGED, QUANTISED, SPLITS, PAGES,
                    STAGES, STAY, TOP_TILES,
                ),
            ),
            (
                fetch_tiles,
                (
                    tiles, scale_rows, block_table, lengths, buffers, scales, full, empty, sequence, token, split,
                    T, LENGTH_STRIDE, TABLE_STRIDE, PAGED, QUANTISED, SPLITS, PAGES, STAGES,
                ),
            ),
        ],
        [1],
        [24],
    )  # fmt: skip
