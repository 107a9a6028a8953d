# pyright: basic, reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false
# Kernel text: inside @gluon.jit, names are tensors and constants of a language whose types say little to a checker.
"""Scores of query rows over pages of 64 MXFP8 keys in groups of 32: what ``indexer_scores`` does for plain pages.

The powers of two of groups stand inside the sum under the ReLU. So keys become 16-bit floats in registers, each group
over the largest scale of its key; queries likewise, once a program. The largest scales are those of a whole key or
head, and leave the sum. One warp fetches; CONSUMERS times four multiply, and take the program's tiles in turn.

In fp16 a program whose groups lie too far apart begins again, in bf16.
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper

from kimigraph.codegen.templates.group_operands import (
    as_operand,
    factor_below,
    half_factor,
    largest_byte,
    power_of_two,
    store_query,
)
from kimigraph.codegen.templates.indexer_scores import (
    bring_inputs,
    head_weights,
    keep_codes,
    largest_of_warp,
    magnitude,
    row_limit,
    tiles_of_split,
)
from kimigraph.codegen.templates.launch_order import let_next_launch_start, wait_for_earlier_launch


@gluon.jit
def fetch_groups(
    tiles, scale_rows, buffers, scales, full, stage, entry, sequence, page, PAGED: gl.constexpr, PLANE: gl.constexpr,
):  # fmt: skip
    """Start the copies of 64 keys and of their scales into a stage; ``full`` counts their bytes.

    A plane, page or sequence, is PLANE keys and then their scales: PLANE * 33 / 32 rows of 128 bytes.
    """
    plane = gl.maximum(entry, 0) if PAGED else sequence.to(gl.int32)
    inside = 0 if PAGED else page * 64
    arrived = full.index(stage)
    hopper.mbarrier.expect(arrived, 64 * 132)
    first = plane * (PLANE // 32 * 33) + inside
    hopper.tma.async_copy_global_to_shared(tiles, [first, 0], arrived, buffers.index(stage))
    place = scales.index(stage)._reinterpret(gl.float32, [1, 64], scale_rows.layout)
    hopper.tma.async_copy_global_to_shared(scale_rows, [plane, PLANE * 32 + inside], arrived, place)


@gluon.jit
def entries_of_tiles(block_table, sequence, page, T: gl.constexpr, TABLE_STRIDE: gl.constexpr, PAGED: gl.constexpr):
    """Table entries of logical pages; past the end the last."""
    page = gl.minimum(page, T // 64 - 1)
    entry = page
    if PAGED:
        place = block_table + sequence * TABLE_STRIDE[0] + page.to(gl.int64) * TABLE_STRIDE[1]
        entry = gl.load(place, cache_modifier=".cg").to(gl.int32)
    return entry


@gluon.jit
def fetch_group_tiles(
    tiles, scale_rows, block_table, lengths, buffers, scales, full, empty, sequence, token, part,
    T: gl.constexpr, LENGTH_STRIDE: gl.constexpr, TABLE_STRIDE: gl.constexpr, PAGED: gl.constexpr,
    PLANE: gl.constexpr, PARTS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Fill the stages with the program's tiles, in turn, as they fall empty. A lane reads an entry of 32 tiles."""
    lane = gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [1], [0]))
    ahead = entries_of_tiles(block_table, sequence, part + lane * PARTS, T, TABLE_STRIDE, PAGED)
    count = tiles_of_split(row_limit(lengths, sequence, token, T, LENGTH_STRIDE), part, PARTS, 1)
    for start in range(0, count, 32):
        entries = ahead
        ahead = entries_of_tiles(block_table, sequence, part + (start + 32 + lane) * PARTS, T, TABLE_STRIDE, PAGED)
        for number in range(start, gl.minimum(start + 32, count)):
            entry = gl.sum(gl.where(lane == number - start, entries, 0), 0)
            stage = number % STAGES
            hopper.mbarrier.wait(empty.index(stage), ((number // STAGES) & 1) ^ 1)
            page = part + number * PARTS
            fetch_groups(tiles, scale_rows, buffers, scales, full, stage, entry, sequence, page, PAGED, PLANE)


@gluon.constexpr_function
def words_of_keys():
    """The layout of 64 keys of 32 words: a thread's words of a row are those of one group, 8 of them."""
    return gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [8, 0]], [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, 32]
    )


@gluon.constexpr_function
def half_of_groups():
    """The same of half of each group's words, [64, 4, 4]."""
    return gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2], [8, 0, 0]],
        [[0, 1, 0], [0, 2, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        [[16, 0, 0], [32, 0, 0]],
        [],
        [64, 4, 4],
    )


@gluon.jit
def tile_operands(buffers, scales, stage, BY_KEY: gl.constexpr, TYPE: gl.constexpr):
    """The keys of a stage: two halves as ints of four bytes, how far their groups lie below the largest of their key,
    the groups' factors, the largest scales."""
    FLAT: gl.constexpr = words_of_keys()
    HALF: gl.constexpr = half_of_groups()
    INTS: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)
    BY_GROUP: gl.constexpr = gl.SliceLayout(2, HALF)
    ints = buffers.index(stage)._reinterpret(gl.int32, [64, 32], INTS).load(FLAT)
    of_key = gl.expand_dims(scales.index(stage).load(gl.SliceLayout(1, BY_GROUP)), 1)
    largest = power_of_two(largest_byte(scales.index(stage).load(BY_KEY)))
    group = gl.expand_dims(gl.arange(0, 4, layout=gl.SliceLayout(0, BY_GROUP)), 0)
    below = gl.expand_dims(largest_byte(of_key) - ((of_key >> (group * 8)) & 0xFF), 2)
    factor = half_factor(below, 7) if TYPE == gl.float16 else factor_below(below)
    first, second = gl.split(gl.permute(gl.reshape(ints, [64, 4, 2, 4]), (0, 1, 3, 2)))
    first = gl.convert_layout(first, HALF, assert_trivial=True)
    second = gl.convert_layout(second, HALF, assert_trivial=True)
    return first, second, below, factor, largest


@gluon.jit
def multiply(first, second, factor, queries, H: gl.constexpr, PRODUCT: gl.constexpr):
    """Products of 64 keys with all heads."""
    TYPE: gl.constexpr = queries.dtype
    zeros = gl.zeros([64, H], gl.float32, layout=PRODUCT)
    left = queries.index(0).permute((1, 0))
    right = queries.index(1).permute((1, 0))
    dots = hopper.warpgroup_mma(as_operand(first, factor, PRODUCT, TYPE), left, zeros, use_acc=False, is_async=True)
    dots = hopper.warpgroup_mma(as_operand(second, factor, PRODUCT, TYPE), right, dots, is_async=True)
    return hopper.warpgroup_mma_wait(0, deps=[dots])


@gluon.jit
def keep_scores(
    dots, weight, largest, codes, tops, row, split, number, last, limit, entry, peak, top,
    T: gl.constexpr, SPLITS: gl.constexpr, STAY: gl.constexpr, TOP_TILES: gl.constexpr, TYPE: gl.constexpr,
):  # fmt: skip
    """Weigh the heads of a tile and keep the codes, and the largest where a group of tiles ends. Returns the largest
    magnitudes and codes until now."""
    TILES: gl.constexpr = (T + 64 * SPLITS - 1) // (64 * SPLITS)
    GROUPS: gl.constexpr = (TILES + TOP_TILES - 1) // TOP_TILES
    # Keys and queries came 2 ** 7 times as large in fp16.
    DOWN: gl.constexpr = 2.0**-14 if TYPE == gl.float16 else 1.0
    index = gl.arange(0, 64, layout=gl.SliceLayout(1, dots.type.layout))
    position = (split + number * SPLITS) * 64 + index
    # Twice the positive part: additions have twice the rate of maxima, and sums of e4m3 are finite.
    score = gl.sum((dots + gl.abs(dots)) * weight, 1) * DOWN * largest
    visible = (position < limit) & (entry >= 0)
    code = keep_codes(codes + row * T, position, score, visible, T, STAY)
    if tops is not None:
        top = largest_of_warp(code, top)
        ends = (number % TOP_TILES == TOP_TILES - 1) | last
        group = (row * GROUPS + number // TOP_TILES) * SPLITS + split
        gl.store(tops + group * 4 + index // 16, top, mask=(index % 16 == 0) & ends)
        top = gl.where((index >= 0) & ends, 0, top)
    return gl.maximum(peak, gl.where(visible, magnitude(score), 0)), top


@gluon.jit
def prepare_query(
    q, q_scales, weights, query_tile, weight_tile, sequence, token,
    H: gl.constexpr, SCALE: gl.constexpr, Q_STRIDE: gl.constexpr, Q_SCALE_STRIDE: gl.constexpr,
    WEIGHT_STRIDE: gl.constexpr, PRODUCT: gl.constexpr,
):  # fmt: skip
    """Bring a row's queries and the weights of its heads to shared memory. Returns how many binades the smallest group
    of a query lies below the largest."""
    q_row = q + sequence * Q_STRIDE[0] + token * Q_STRIDE[1]
    scale_row = None
    if q_scales is not None:
        scale_row = q_scales + sequence * Q_SCALE_STRIDE[0] + token * Q_SCALE_STRIDE[1]
    weight_row = weights + sequence * WEIGHT_STRIDE[0] + token * WEIGHT_STRIDE[1]
    weight = head_weights(weight_row, H, WEIGHT_STRIDE[2], gl.SliceLayout(0, PRODUCT))
    of_head, far = store_query(query_tile, q_row, scale_row, H, Q_STRIDE, Q_SCALE_STRIDE, gl.SliceLayout(0, PRODUCT))
    weight_tile.store(weight * (0.5 * SCALE) * of_head)
    hopper.fence_async_shared()
    tl.debug_barrier()
    return far


@gluon.jit
def score_group_tiles(
    q, q_scales, weights, lengths, block_table, codes, tops, peaks, buffers, scales, query_tile, weight_tile, flags,
    full, empty, ready, row, sequence, token, part, WHICH: gl.constexpr,
    T: gl.constexpr, H: gl.constexpr, SCALE: gl.constexpr, Q_STRIDE: gl.constexpr, Q_SCALE_STRIDE: gl.constexpr,
    WEIGHT_STRIDE: gl.constexpr, LENGTH_STRIDE: gl.constexpr, TABLE_STRIDE: gl.constexpr, PAGED: gl.constexpr,
    SPLITS: gl.constexpr, CONSUMERS: gl.constexpr, STAGES: gl.constexpr, STAY: gl.constexpr, TOP_TILES: gl.constexpr,
):  # fmt: skip
    """Score every CONSUMERS-th tile of the program as it comes: a split of the row."""
    PRODUCT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, H, 16])
    BY_KEY: gl.constexpr = gl.SliceLayout(1, PRODUCT)
    TYPE: gl.constexpr = query_tile.dtype
    split = part + WHICH * (SPLITS // CONSUMERS)
    limit = row_limit(lengths, sequence, token, T, LENGTH_STRIDE)
    ahead = entries_of_tiles(block_table, sequence, split, T, TABLE_STRIDE, PAGED)
    if WHICH == 0:
        far = prepare_query(
            q, q_scales, weights, query_tile, weight_tile, sequence, token,
            H, SCALE, Q_STRIDE, Q_SCALE_STRIDE, WEIGHT_STRIDE, PRODUCT,
        )  # fmt: skip
        flags.index(CONSUMERS).store(gl.full([64], 0, gl.int32, BY_KEY) + far)
        hopper.mbarrier.arrive(ready, count=1)
    hopper.mbarrier.wait(ready, 0)
    weight = gl.expand_dims(weight_tile.load(gl.SliceLayout(0, PRODUCT)), 0)
    peak = gl.zeros([64], gl.int32, layout=BY_KEY)
    top = peak
    farthest = gl.zeros([64, 4, 1], gl.int32, layout=half_of_groups())
    count = tiles_of_split(limit, split, SPLITS, 1)
    for number in range(0, count):
        place = number * CONSUMERS + WHICH
        stage = place % STAGES
        entry = ahead
        ahead = entries_of_tiles(block_table, sequence, split + (number + 1) * SPLITS, T, TABLE_STRIDE, PAGED)
        hopper.mbarrier.wait(full.index(stage), (place // STAGES) & 1)
        first, second, below, factor, largest = tile_operands(buffers, scales, stage, BY_KEY, TYPE)
        if TYPE == gl.float16:
            farthest = gl.maximum(farthest, below)
        dots = multiply(first, second, factor, query_tile, H, PRODUCT)
        # Not before: what this warp and others have loaded must have come, and only the products prove that it has.
        hopper.mbarrier.arrive(empty.index(stage), count=1)
        peak, top = keep_scores(
            dots, weight, largest, codes, tops, row, split, number, number == count - 1, limit, entry, peak, top,
            T, SPLITS, STAY, TOP_TILES, TYPE,
        )  # fmt: skip
    gl.store(peaks + row * SPLITS + split, gl.max(peak, 0))
    if TYPE == gl.float16:
        flags.index(WHICH).store(gl.convert_layout(gl.max(gl.max(farthest, 2), 1), BY_KEY))


@gluon.jit
def score_again(
    tiles, scale_rows, q, q_scales, weights, lengths, block_table, codes, tops, peaks, buffers, scales, query_tile,
    weight_tile, full, row, sequence, token, part,
    T: gl.constexpr, H: gl.constexpr, SCALE: gl.constexpr, Q_STRIDE: gl.constexpr, Q_SCALE_STRIDE: gl.constexpr,
    WEIGHT_STRIDE: gl.constexpr, LENGTH_STRIDE: gl.constexpr, TABLE_STRIDE: gl.constexpr, PAGED: gl.constexpr,
    PLANE: gl.constexpr, SPLITS: gl.constexpr, CONSUMERS: gl.constexpr, STAGES: gl.constexpr, STAY: gl.constexpr,
    TOP_TILES: gl.constexpr,
):  # fmt: skip
    """All of the program's tiles in bf16, one after the other through the first stage."""
    PRODUCT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, H, 16])
    BY_KEY: gl.constexpr = gl.SliceLayout(1, PRODUCT)
    PARTS: gl.constexpr = SPLITS // CONSUMERS
    words = scales._reinterpret(gl.int32, [STAGES, 64], scales.type.layout)
    queries = query_tile._reinterpret(gl.bfloat16, [2, H, 64], query_tile.type.layout)
    prepare_query(
        q, q_scales, weights, queries, weight_tile, sequence, token,
        H, SCALE, Q_STRIDE, Q_SCALE_STRIDE, WEIGHT_STRIDE, PRODUCT,
    )  # fmt: skip
    weight = gl.expand_dims(weight_tile.load(gl.SliceLayout(0, PRODUCT)), 0)
    limit = row_limit(lengths, sequence, token, T, LENGTH_STRIDE)
    fetched = (tiles_of_split(limit, part, PARTS, 1) + STAGES - 1) // STAGES
    for which in range(0, CONSUMERS):
        split = part + which * PARTS
        peak = gl.zeros([64], gl.int32, layout=BY_KEY)
        top = peak
        count = tiles_of_split(limit, split, SPLITS, 1)
        for number in range(0, count):
            tile = split + number * SPLITS
            entry = entries_of_tiles(block_table, sequence, tile, T, TABLE_STRIDE, PAGED)
            # Nobody reads the tile before any more.
            tl.debug_barrier()
            fetch_groups(tiles, scale_rows, buffers, scales, full, 0, entry, sequence, tile, PAGED, PLANE)
            hopper.mbarrier.wait(full.index(0), fetched & 1)
            fetched += 1
            first, second, _, factor, largest = tile_operands(buffers, words, 0, BY_KEY, gl.bfloat16)
            dots = multiply(first, second, factor, queries, H, PRODUCT)
            peak, top = keep_scores(
                dots, weight, largest, codes, tops, row, split, number, number == count - 1, limit, entry, peak, top,
                T, SPLITS, STAY, TOP_TILES, gl.bfloat16,
            )  # fmt: skip
        gl.store(peaks + row * SPLITS + split, gl.max(peak, 0))


@gluon.jit
def score_group_rows(
    tiles, scale_rows, q, q_scales, weights, lengths, block_table, codes, tops, peaks,
    S: gl.constexpr, T: gl.constexpr, H: gl.constexpr, SCALE: gl.constexpr,
    Q_STRIDE: gl.constexpr, Q_SCALE_STRIDE: gl.constexpr, WEIGHT_STRIDE: gl.constexpr, LENGTH_STRIDE: gl.constexpr,
    TABLE_STRIDE: gl.constexpr, PAGED: gl.constexpr, PLANE: gl.constexpr, SPLITS: gl.constexpr,
    CONSUMERS: gl.constexpr, STAGES: gl.constexpr, STAY: gl.constexpr, TOP_TILES: gl.constexpr, FP16: gl.constexpr,
    REGISTERS: gl.constexpr,
):  # fmt: skip
    """As ``score_rows``, CONSUMERS of the row's SPLITS a program; ``scale_rows`` hold four bytes a key."""
    KEYS: gl.constexpr = gl.NVMMASharedLayout(128, 8, rank=2)
    QUERIES: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    WORDS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    PARTS: gl.constexpr = SPLITS // CONSUMERS
    part = gl.program_id(0) % PARTS
    row = (gl.program_id(0) // PARTS).to(gl.int64)
    sequence = row // S
    token = row % S
    buffers = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, 64, 128], KEYS)
    scales = gl.allocate_shared_memory(gl.float32, [STAGES, 64], WORDS)
    words = scales._reinterpret(gl.int32, [STAGES, 64], WORDS)
    query_tile = gl.allocate_shared_memory(gl.float16 if FP16 else gl.bfloat16, [2, H, 64], QUERIES)
    weight_tile = gl.allocate_shared_memory(gl.float32, [H], WORDS)
    flags = gl.allocate_shared_memory(gl.int32, [CONSUMERS + 1, 64], WORDS)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], hopper.mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], hopper.mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [1], hopper.mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        hopper.mbarrier.init(full.index(stage), count=1)
        hopper.mbarrier.init(empty.index(stage), count=1)
    hopper.mbarrier.init(ready, count=1)
    let_next_launch_start()
    bring_inputs(lengths, block_table, sequence, part, T, LENGTH_STRIDE, TABLE_STRIDE, PARTS)
    wait_for_earlier_launch()
    if CONSUMERS == 1:
        gl.warp_specialize([
            (score_group_tiles, (
                q, q_scales, weights, lengths, block_table, codes, tops, peaks, buffers, words, query_tile, weight_tile,
                flags, full, empty, ready, row, sequence, token, part, 0,
                T, H, SCALE, Q_STRIDE, Q_SCALE_STRIDE, WEIGHT_STRIDE, LENGTH_STRIDE, TABLE_STRIDE, PAGED, SPLITS,
                CONSUMERS, STAGES, STAY, TOP_TILES,
            )),
            (fetch_group_tiles, (
                tiles, scale_rows, block_table, lengths, buffers, scales, full, empty, sequence, token, part,
                T, LENGTH_STRIDE, TABLE_STRIDE, PAGED, PLANE, PARTS, STAGES,
            )),
        ], [1], [24])  # fmt: skip
    else:
        gl.warp_specialize([
            (score_group_tiles, (
                q, q_scales, weights, lengths, block_table, codes, tops, peaks, buffers, words, query_tile, weight_tile,
                flags, full, empty, ready, row, sequence, token, part, 0,
                T, H, SCALE, Q_STRIDE, Q_SCALE_STRIDE, WEIGHT_STRIDE, LENGTH_STRIDE, TABLE_STRIDE, PAGED, SPLITS,
                CONSUMERS, STAGES, STAY, TOP_TILES,
            )),
            (score_group_tiles, (
                q, q_scales, weights, lengths, block_table, codes, tops, peaks, buffers, words, query_tile, weight_tile,
                flags, full, empty, ready, row, sequence, token, part, 1,
                T, H, SCALE, Q_STRIDE, Q_SCALE_STRIDE, WEIGHT_STRIDE, LENGTH_STRIDE, TABLE_STRIDE, PAGED, SPLITS,
                CONSUMERS, STAGES, STAY, TOP_TILES,
            )),
            (score_group_tiles, (
                q, q_scales, weights, lengths, block_table, codes, tops, peaks, buffers, words, query_tile, weight_tile,
                flags, full, empty, ready, row, sequence, token, part, 2,
                T, H, SCALE, Q_STRIDE, Q_SCALE_STRIDE, WEIGHT_STRIDE, LENGTH_STRIDE, TABLE_STRIDE, PAGED, SPLITS,
                CONSUMERS, STAGES, STAY, TOP_TILES,
            )),
            (score_group_tiles, (
                q, q_scales, weights, lengths, block_table, codes, tops, peaks, buffers, words, query_tile, weight_tile,
                flags, full, empty, ready, row, sequence, token, part, 3,
                T, H, SCALE, Q_STRIDE, Q_SCALE_STRIDE, WEIGHT_STRIDE, LENGTH_STRIDE, TABLE_STRIDE, PAGED, SPLITS,
                CONSUMERS, STAGES, STAY, TOP_TILES,
            )),
            (fetch_group_tiles, (
                tiles, scale_rows, block_table, lengths, buffers, scales, full, empty, sequence, token, part,
                T, LENGTH_STRIDE, TABLE_STRIDE, PAGED, PLANE, PARTS, STAGES,
            )),
        ], [4, 4, 4, 1], [REGISTERS, REGISTERS, REGISTERS, 24])  # fmt: skip
    if FP16:
        far = gl.to_tensor(0)
        for which in gl.static_range(CONSUMERS + 1):
            flag = flags.index(which).load(gl.BlockedLayout([1], [32], [4], [0]))
            far = gl.maximum(far, gl.max(flag, 0))
        if far > 21:
            score_again(
                tiles, scale_rows, q, q_scales, weights, lengths, block_table, codes, tops, peaks, buffers, scales,
                query_tile, weight_tile, full, row, sequence, token, part,
                T, H, SCALE, Q_STRIDE, Q_SCALE_STRIDE, WEIGHT_STRIDE, LENGTH_STRIDE, TABLE_STRIDE, PAGED, PLANE,
                SPLITS, CONSUMERS, STAGES, STAY, TOP_TILES,
            )  # fmt: skip
