# pyright: basic, reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false
# Kernel text: inside @gluon.jit, names are tensors and constants of a language whose types say little to a checker.
"""Scores of query rows over pages of 64 MXFP8 keys in groups of 32: what ``indexer_scores`` does for plain pages.

The powers of two of groups stand inside the sum under the ReLU. So keys become bf16 in registers, where they are
exact, each group over the largest scale of its key; queries likewise, once. The largest scales are those of a whole key
or head, and leave the sum. Channels stand in the order in which a thread finds them: its 32 bytes are a group.
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper

from kimigraph.codegen.templates.indexer_scores import (
    head_weights,
    keep_codes,
    magnitude,
    mapped,
    row_limit,
    tile_entries,
    tiles_of_split,
)
from kimigraph.codegen.templates.launch_order import let_next_launch_start, wait_for_earlier_launch


@gluon.jit
def largest_byte(word):
    """The largest of the four bytes of an int."""
    high = gl.maximum((word >> 16) & 0xFF, (word >> 24) & 0xFF)
    low = gl.maximum(word & 0xFF, (word >> 8) & 0xFF)
    return gl.maximum(high, low)


@gluon.jit
def power_of_two(byte):
    """What a byte of E8M0 means, fp32; 255 is NaN."""
    bits = gl.where(byte == 0, 0x00400000, byte << 23)
    return gl.where(byte == 255, 0x7FC00000, bits).to(gl.float32, bitcast=True)


@gluon.jit
def factor_below(below):
    """2 ** (120 - below) as bf16 twice in an int; 0 where that is less than 2 ** -126."""
    return gl.maximum(247 - below, 0) * 0x00800080


@gluon.jit
def scaled_pairs(four, factor):
    """The four e4m3 bytes of an int -> bf16 of value * factor / 2 ** 120, two ints of two."""
    return gl.inline_asm_elementwise(
        """
        {
        .reg .b32 a0, a1;
        prmt.b32 a0, $2, 0, 0x9180;
        prmt.b32 a1, $2, 0, 0xb3a2;
        shl.b32 a0, a0, 4;
        shl.b32 a1, a1, 4;
        and.b32 a0, a0, 0x87f087f0;
        and.b32 a1, a1, 0x87f087f0;
        mul.rn.bf16x2 $0, a0, $3;
        mul.rn.bf16x2 $1, a1, $3;
        }
        """,
        "=r,=r,r,r",
        [four, factor],
        dtype=(gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )


@gluon.jit
def halves_of(pair):
    """The two bf16 of an int."""
    return gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;", "=h,=h,r", [pair], dtype=(gl.bfloat16, gl.bfloat16), is_pure=True, pack=1
    )


@gluon.jit
def ordered_pairs(four, factor):
    """[rows, 4 groups, slices] ints of four bytes -> [rows, slices, 2, 4] ints: pairs in the order of the products."""
    first, second = scaled_pairs(four, factor)
    return gl.permute(gl.join(first, second), (0, 2, 3, 1))


@gluon.jit
def as_operand(four, factor, PRODUCT: gl.constexpr):
    """The same as the left side of a product: bf16 [rows, 16 * slices]."""
    pairs = ordered_pairs(four, factor)
    low, high = halves_of(pairs)
    values = gl.reshape(gl.join(low, high), [four.shape[0], 16 * four.shape[2]])
    return gl.convert_layout(values, gl.DotOperandLayout(0, PRODUCT, 2), assert_trivial=True)


@gluon.jit
def scale_bytes(pairs):
    """The bytes of E8M0 for [.., 32 values as 16 ints of two bf16], rounded up: ``e8m0_scale`` along the last axis."""
    largest = gl.max(gl.maximum((pairs << 16) & 0x7FFFFFFF, pairs & 0x7FFF0000), 2)
    # 448 is 1.75 * 2 ** 8, and the mantissa bits of 1.75 are 0x600000.
    byte = (largest >> 23) - 8 + ((largest & 0x7FFFFF) > 0x600000).to(gl.int32)
    byte = gl.where(largest == 0x7F800000, 254, gl.minimum(gl.maximum(byte, 0), 254))
    return gl.where(largest > 0x7F800000, 255, byte)


@gluon.jit
def codes_of(first, second, inverse):
    """Four bf16 in two ints, times ``inverse`` -> the four bytes of the nearest e4m3."""
    return gl.inline_asm_elementwise(
        """
        {
        .reg .b32 high0, high1;
        .reg .f32 v0, v1, v2, v3;
        .reg .b16 low, high;
        shl.b32 high0, $1, 16;
        shl.b32 high1, $2, 16;
        mov.b32 v0, high0;
        mov.b32 v2, high1;
        and.b32 high0, $1, 0xffff0000;
        and.b32 high1, $2, 0xffff0000;
        mov.b32 v1, high0;
        mov.b32 v3, high1;
        mul.rn.f32 v0, v0, $3;
        mul.rn.f32 v1, v1, $3;
        mul.rn.f32 v2, v2, $3;
        mul.rn.f32 v3, v3, $3;
        cvt.rn.satfinite.e4m3x2.f32 low, v1, v0;
        cvt.rn.satfinite.e4m3x2.f32 high, v3, v2;
        mov.b32 $0, {low, high};
        }
        """,
        "=r,r,r,f",
        [first, second, inverse],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def query_groups(q_row, scale_row, H: gl.constexpr, Q_STRIDE: gl.constexpr, Q_SCALE_STRIDE: gl.constexpr):
    """The queries of a row in groups: codes as ints of four [H, 4, 8], and the bytes of their scales [H, 4].

    Without ``scale_row`` they are bf16, and quantised here.
    """
    WORDS: gl.constexpr = gl.BlockedLayout([1, 1, 8], [8, 4, 1], [gl.num_warps(), 1, 1], [2, 1, 0])
    PAIRS: gl.constexpr = gl.BlockedLayout([1, 1, 16], [8, 4, 1], [gl.num_warps(), 1, 1], [2, 1, 0])
    LAYOUT: gl.constexpr = PAIRS if scale_row is None else WORDS
    INTS: gl.constexpr = 16 if scale_row is None else 8
    BY_GROUP: gl.constexpr = gl.SliceLayout(2, LAYOUT)
    head = gl.expand_dims(gl.arange(0, H, layout=gl.SliceLayout(1, BY_GROUP)), 1)
    group = gl.expand_dims(gl.arange(0, 4, layout=gl.SliceLayout(0, BY_GROUP)), 0)
    place = gl.arange(0, INTS, layout=gl.SliceLayout(0, gl.SliceLayout(0, LAYOUT)))
    place = gl.expand_dims(gl.expand_dims(place, 0), 0)
    place += gl.expand_dims(head * (Q_STRIDE[2] // (32 // INTS)) + group * INTS, 2)
    ints = gl.load(q_row.to(gl.pointer_type(gl.int32)) + place, cache_modifier=".cg")
    if scale_row is None:
        byte = scale_bytes(ints)
        first, second = gl.split(gl.reshape(ints, [H, 4, 8, 2]))
        first = gl.convert_layout(first, WORDS, assert_trivial=True)
        second = gl.convert_layout(second, WORDS, assert_trivial=True)
        byte = gl.convert_layout(byte, gl.SliceLayout(2, WORDS), assert_trivial=True)
        inverse = power_of_two(gl.where(byte == 255, 255, 254 - byte))
        ints = codes_of(first, second, gl.expand_dims(inverse, 2))
    else:
        byte = gl.load(scale_row + head * Q_SCALE_STRIDE[2] + group, cache_modifier=".cg").to(gl.int32)
    return ints, byte


@gluon.jit
def store_query(
    query_tile, q_row, scale_row, H: gl.constexpr, Q_STRIDE: gl.constexpr, Q_SCALE_STRIDE: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    """Bring the queries of a row to shared memory, bf16 over the largest scales of their heads, which are returned.

    Two tiles, of 64 channels each.
    """
    PAIRS: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)
    words, byte = query_groups(q_row, scale_row, H, Q_STRIDE, Q_SCALE_STRIDE)
    largest = gl.max(byte, 1)
    factor = gl.expand_dims(factor_below(gl.expand_dims(largest, 1) - byte), 2)
    first, second = gl.split(gl.permute(gl.reshape(words, [H, 4, 2, 4]), (0, 1, 3, 2)))
    factor = gl.convert_layout(factor, first.type.layout)
    query_tile.index(0)._reinterpret(gl.int32, [H, 32], PAIRS).store(gl.reshape(ordered_pairs(first, factor), [H, 32]))
    query_tile.index(1)._reinterpret(gl.int32, [H, 32], PAIRS).store(gl.reshape(ordered_pairs(second, factor), [H, 32]))
    return power_of_two(gl.convert_layout(largest, LAYOUT))


@gluon.jit
def fetch_groups(
    tiles, scale_rows, buffers, scales, full, stage, entries, sequence, page, live, PAGED: gl.constexpr,
    PLANE: gl.constexpr,
):  # fmt: skip
    """Start the copies of 64 keys and of their scales into a stage; ``full`` counts their bytes.

    A plane, page or sequence, is PLANE keys and then their scales: PLANE * 33 / 32 rows of 128 bytes.
    """
    plane = gl.maximum(entries[0], 0) if PAGED else sequence.to(gl.int32)
    inside = 0 if PAGED else gl.minimum(page, PLANE // 64 - 1) * 64
    arrived = full.index(stage)
    hopper.mbarrier.expect(arrived, 64 * 132, pred=live)
    first = plane * (PLANE // 32 * 33) + inside
    hopper.tma.async_copy_global_to_shared(tiles, [first, 0], arrived, buffers.index(stage), pred=live)
    place = scales.index(stage)._reinterpret(gl.float32, [1, 64], scale_rows.layout)
    hopper.tma.async_copy_global_to_shared(scale_rows, [plane, PLANE * 32 + inside], arrived, place, pred=live)


@gluon.jit
def fetch_group_tiles(
    tiles, scale_rows, block_table, lengths, buffers, scales, full, empty, sequence, token, split,
    T: gl.constexpr, LENGTH_STRIDE: gl.constexpr, TABLE_STRIDE: gl.constexpr, PAGED: gl.constexpr,
    PLANE: gl.constexpr, SPLITS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Fill the stages with the program's tiles, in turn, as they fall empty. Entries are read two tiles ahead."""
    limit = row_limit(lengths, sequence, token, T, LENGTH_STRIDE)
    entries = ()
    for tile in gl.static_range(STAGES + 2):
        entries = entries + (tile_entries(block_table, sequence, split + tile * SPLITS, T, TABLE_STRIDE, PAGED, 1),)
    count = tiles_of_split(limit, split, SPLITS, 1)
    for stage in gl.static_range(STAGES):
        fetch_groups(
            tiles, scale_rows, buffers, scales, full, stage, entries[stage], sequence, split + stage * SPLITS,
            stage < count, PAGED, PLANE,
        )  # fmt: skip
    next = entries[STAGES]
    after_next = entries[STAGES + 1]
    for number in range(0, count - STAGES):
        place = number % STAGES
        hopper.mbarrier.wait(empty.index(place), (number // STAGES) & 1)
        current = next
        next = after_next
        page = split + (number + STAGES) * SPLITS
        after_next = tile_entries(block_table, sequence, page + 2 * SPLITS, T, TABLE_STRIDE, PAGED, 1)
        fetch_groups(tiles, scale_rows, buffers, scales, full, place, current, sequence, page, True, PAGED, PLANE)


@gluon.jit
def score_group_tiles(
    q, q_scales, weights, lengths, block_table, codes, peaks, buffers, scales, query_tile, full, empty, row,
    sequence, token, split,
    T: gl.constexpr, H: gl.constexpr, SCALE: gl.constexpr, Q_STRIDE: gl.constexpr, Q_SCALE_STRIDE: gl.constexpr,
    WEIGHT_STRIDE: gl.constexpr, LENGTH_STRIDE: gl.constexpr, TABLE_STRIDE: gl.constexpr, PAGED: gl.constexpr,
    SPLITS: gl.constexpr, STAGES: gl.constexpr, STAY: gl.constexpr,
):  # fmt: skip
    """Score the tiles as they come."""
    PRODUCT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, H, 16])
    BY_KEY: gl.constexpr = gl.SliceLayout(1, PRODUCT)
    # A thread's words of a row are those of one group, 8 of them.
    FLAT: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [8, 0]], [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, 32]
    )
    HALF: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2], [8, 0, 0]], [[0, 1, 0], [0, 2, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        [[16, 0, 0], [32, 0, 0]], [], [64, 4, 4],
    )  # fmt: skip
    INTS: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)
    BY_GROUP: gl.constexpr = gl.SliceLayout(2, HALF)
    limit = row_limit(lengths, sequence, token, T, LENGTH_STRIDE)
    q_row = q + sequence * Q_STRIDE[0] + token * Q_STRIDE[1]
    scale_row = None
    if q_scales is not None:
        scale_row = q_scales + sequence * Q_SCALE_STRIDE[0] + token * Q_SCALE_STRIDE[1]
    weight_row = weights + sequence * WEIGHT_STRIDE[0] + token * WEIGHT_STRIDE[1]
    weight = head_weights(weight_row, H, WEIGHT_STRIDE[2], gl.SliceLayout(0, PRODUCT))
    of_head = store_query(query_tile, q_row, scale_row, H, Q_STRIDE, Q_SCALE_STRIDE, gl.SliceLayout(0, PRODUCT))
    weight = gl.expand_dims(weight * (0.5 * SCALE) * of_head, 0)
    hopper.fence_async_shared()
    tl.debug_barrier()
    left = query_tile.index(0).permute((1, 0))
    right = query_tile.index(1).permute((1, 0))
    codes += row * T
    index = gl.arange(0, 64, layout=BY_KEY)
    group = gl.expand_dims(gl.arange(0, 4, layout=gl.SliceLayout(0, BY_GROUP)), 0)
    zeros = gl.zeros([64, H], gl.float32, layout=PRODUCT)
    peak = gl.zeros([64], gl.int32, layout=BY_KEY)
    ahead = tile_entries(block_table, sequence, split, T, TABLE_STRIDE, PAGED, 1)
    for number in range(0, tiles_of_split(limit, split, SPLITS, 1)):
        tile = split + number * SPLITS
        stage = number % STAGES
        entries = ahead
        ahead = tile_entries(block_table, sequence, tile + SPLITS, T, TABLE_STRIDE, PAGED, 1)
        hopper.mbarrier.wait(full.index(stage), (number // STAGES) & 1)
        ints = buffers.index(stage)._reinterpret(gl.int32, [64, 32], INTS).load(FLAT)
        word = scales.index(stage).load(gl.SliceLayout(1, BY_GROUP))
        largest = power_of_two(largest_byte(scales.index(stage).load(BY_KEY)))
        of_key = gl.expand_dims(word, 1)
        factor = gl.expand_dims(factor_below(largest_byte(of_key) - ((of_key >> (group * 8)) & 0xFF)), 2)
        grouped = gl.permute(gl.reshape(ints, [64, 4, 2, 4]), (0, 1, 3, 2))
        first, second = gl.split(grouped)
        first = gl.convert_layout(first, HALF, assert_trivial=True)
        second = gl.convert_layout(second, HALF, assert_trivial=True)
        dots = hopper.warpgroup_mma(as_operand(first, factor, PRODUCT), left, zeros, use_acc=False, is_async=True)
        dots = hopper.warpgroup_mma(as_operand(second, factor, PRODUCT), right, dots, is_async=True)
        dots = hopper.warpgroup_mma_wait(0, deps=[dots])
        # Twice the positive part: additions have twice the rate of maxima, and sums of e4m3 are finite.
        score = gl.sum((dots + gl.abs(dots)) * weight, 1) * largest
        # Not before: what this warp and others have loaded must have come, and only the products prove that it has.
        hopper.mbarrier.arrive(empty.index(stage), count=1)
        visible = tile * 64 + index < limit
        if PAGED:
            visible = visible & mapped(index, entries, 1)
        keep_codes(codes, tile * 64 + index, score, visible, T, STAY)
        peak = gl.maximum(peak, gl.where(visible, magnitude(score), 0))
    gl.store(peaks + row * SPLITS + split, gl.max(peak, 0))


@gluon.jit
def score_group_rows(
    tiles, scale_rows, q, q_scales, weights, lengths, block_table, codes, peaks,
    S: gl.constexpr, T: gl.constexpr, H: gl.constexpr, SCALE: gl.constexpr,
    Q_STRIDE: gl.constexpr, Q_SCALE_STRIDE: gl.constexpr, WEIGHT_STRIDE: gl.constexpr, LENGTH_STRIDE: gl.constexpr,
    TABLE_STRIDE: gl.constexpr, PAGED: gl.constexpr, PLANE: gl.constexpr, SPLITS: gl.constexpr, STAGES: gl.constexpr,
    STAY: gl.constexpr,
):  # fmt: skip
    """As ``score_rows``; ``scale_rows`` hold four bytes a key."""
    KEYS: gl.constexpr = gl.NVMMASharedLayout(128, 8, rank=2)
    QUERIES: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    WORDS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    split = gl.program_id(0) % SPLITS
    row = (gl.program_id(0) // SPLITS).to(gl.int64)
    sequence = row // S
    token = row % S
    buffers = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, 64, 128], KEYS)
    scales = gl.allocate_shared_memory(gl.float32, [STAGES, 64], WORDS)
    scale_words = scales._reinterpret(gl.int32, [STAGES, 64], WORDS)
    query_tile = gl.allocate_shared_memory(gl.bfloat16, [2, H, 64], QUERIES)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], hopper.mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], hopper.mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        hopper.mbarrier.init(full.index(stage), count=1)
        hopper.mbarrier.init(empty.index(stage), count=1)
    let_next_launch_start()
    wait_for_earlier_launch()
    gl.warp_specialize(
        [
            (
                score_group_tiles,
                (
                    q, q_scales, weights, lengths, block_table, codes, peaks, buffers, scale_words, query_tile,
                    full, empty, row, sequence, token, split,
                    T, H, SCALE, Q_STRIDE, Q_SCALE_STRIDE, WEIGHT_STRIDE, LENGTH_STRIDE, TABLE_STRIDE, PAGED, SPLITS,
                    STAGES, STAY,
                ),
            ),
            (
                fetch_group_tiles,
                (
                    tiles, scale_rows, block_table, lengths, buffers, scales, full, empty, sequence, token, split,
                    T, LENGTH_STRIDE, TABLE_STRIDE, PAGED, PLANE, SPLITS, STAGES,
                ),
            ),
        ],
        [1],
        [24],
    )  # fmt: skip
