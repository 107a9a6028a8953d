# pyright: basic, reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false
# Kernel text: inside @gluon.jit, names are tensors and constants of a language whose types say little to a checker.
"""``kda_chunk`` for heads of 128 and a bounded gate on Hopper: two chunks of 32 tokens a program, as rows of one tile.

Warp-group products have 64 rows at least; of [64, 64] results only the two blocks on the diagonal count. Operands stay
in shared memory, so a thread holds little besides its 64 elements, and three programs share a multiprocessor.
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from kimigraph.codegen.templates.kda_chunk import chunk_rows
from kimigraph.codegen.templates.kda_gate import log_decay, sigmoid


@gluon.jit
def add(a, b):
    """For scans."""
    return a + b


@gluon.jit
def inverse_of_blocks(strict, tiles0, tiles1, LAYOUT: gl.constexpr):
    """(1 + strict)^-1 of strictly lower [32, 32] blocks on the diagonal of [64, 64]; see ``inverse_of_unit_lower``.

    Both ``tiles`` [2, 64, 64] fp16 are scratch, for a level each in turn, so that one barrier a level orders all.
    """
    ROWS: gl.constexpr = 64
    OPERAND: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=LAYOUT, k_width=2)
    i = gl.expand_dims(gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT)), 1)
    j = gl.expand_dims(gl.arange(0, ROWS, layout=gl.SliceLayout(0, LAYOUT)), 0)
    zeros = gl.zeros([ROWS, ROWS], gl.float32, layout=LAYOUT)
    inverse = gl.where(i == j, 1.0, gl.where((i // 2 == j // 2) & (i > j), -strict, 0.0))
    for level in gl.static_range(1, 5):
        pair = (i >> (level + 1) == j >> (level + 1)) & (i >> level > j >> level)
        narrowed = inverse.to(gl.float16)
        tiles = tiles0 if level % 2 == 0 else tiles1
        below = tiles.index(0)
        old = tiles.index(1)
        below.store(gl.where(pair, strict, 0.0).to(gl.float16))
        old.store(narrowed)
        fence_async_shared()
        tl.debug_barrier()
        left = warpgroup_mma(gl.convert_layout(narrowed, OPERAND), below, zeros, use_acc=False)
        right = warpgroup_mma(gl.convert_layout(left.to(gl.float16), OPERAND), old, zeros, use_acc=False)
        inverse = inverse - right
    return inverse


@gluon.jit
def copy_rows(
    tile,
    tensor,
    sequence0,
    first0,
    count0,
    sequence1,
    first1,
    count1,
    head,
    STRIDE: gl.constexpr,
    ROW_TILE: gl.constexpr,
):
    """Have 32 tokens from ``first0`` on and 32 from ``first1`` on copied to a tile [64, 128], as far as they are there.

    Rows without a token become zeros.
    """
    row = gl.expand_dims(gl.arange(0, 64, layout=gl.SliceLayout(1, ROW_TILE)), 1)
    lane = gl.expand_dims(gl.arange(0, 128, layout=gl.SliceLayout(0, ROW_TILE)), 0)
    start0 = sequence0.to(gl.int64) * STRIDE[0] + first0.to(gl.int64) * STRIDE[1]
    start1 = sequence1.to(gl.int64) * STRIDE[0] + first1.to(gl.int64) * STRIDE[1]
    place = tensor + head * STRIDE[2] + gl.where(row < 32, start0, start1)
    mask = (row % 32 < gl.where(row < 32, count0, count1)) & (lane >= 0)
    async_copy.async_copy_global_to_shared(tile, place + ((row % 32) * STRIDE[1] + lane * STRIDE[3]), mask=mask)


@gluon.jit
def own_rows(tile, ROW_TILE: gl.constexpr, LAYOUT: gl.constexpr):
    """[2, 32, 128] in fp32 of a tile [64, 128]: to each thread of ``LAYOUT`` the elements that it copied or stored."""
    value = gl.reshape(tile.load(ROW_TILE), [2, 32, 128])
    return gl.convert_layout(value, LAYOUT, assert_trivial=True).to(gl.float32)


@gluon.jit
def prepare_chunk_pairs(
    q,
    k,
    v,
    g,
    beta,
    a_log,
    dt_bias,
    cu_seqlens,
    reads,
    values,
    writes,
    pairs,
    decays,
    T: gl.constexpr,
    H: gl.constexpr,
    CHUNKS: gl.constexpr,
    SEQUENCES: gl.constexpr,
    SCALE: gl.constexpr,
    L2_NORM: gl.constexpr,
    L2_EPS: gl.constexpr,
    LOWER_BOUND: gl.constexpr,
    Q_STRIDE: gl.constexpr,
    K_STRIDE: gl.constexpr,
    V_STRIDE: gl.constexpr,
    G_STRIDE: gl.constexpr,
    BETA_STRIDE: gl.constexpr,
    RATE_STRIDE: gl.constexpr,
    BIAS_STRIDE: gl.constexpr,
    BLOCK_N: gl.constexpr,
    GATE_IN_TILE: gl.constexpr,
):
    """The scratch of ``prepare_chunks`` for slots 2 i and 2 i + 1, which are of one sequence."""
    C: gl.constexpr = 32
    D: gl.constexpr = 128
    ROWS: gl.constexpr = 2 * C
    # A warp has 16 tokens, a thread 8 tokens in a row by 8 channels: sums over tokens are mostly its own.
    TILE: gl.constexpr = gl.BlockedLayout([1, 8, 8], [1, 2, 16], [2, 2, 1], [2, 1, 0])
    ROW_TILE: gl.constexpr = gl.BlockedLayout([8, 8], [2, 16], [4, 1], [1, 0])  # the same, with the chunks as one axis
    CHUNK_ROW: gl.constexpr = gl.SliceLayout(2, TILE)  # [chunk, token]
    CHUNK_CHANNEL: gl.constexpr = gl.SliceLayout(1, TILE)  # [chunk, channel]
    SQUARE: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, ROWS, 16])
    WIDE: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, D], gl.bfloat16)
    SHARED_SQUARE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, ROWS], gl.float16)
    head = gl.program_id(0)
    slot = 2 * gl.program_id(1)
    entry = gl.arange(0, BLOCK_N, layout=gl.BlockedLayout([1], [32], [4], [0]))
    first0, count0, sequence0 = chunk_rows(cu_seqlens, slot, entry, T, CHUNKS, SEQUENCES, C, 2)
    first1, count1, sequence1 = chunk_rows(cu_seqlens, slot + 1, entry, T, CHUNKS, SEQUENCES, C, 2)

    chunk = gl.expand_dims(gl.arange(0, 2, layout=gl.SliceLayout(1, CHUNK_ROW)), 1)
    row = gl.expand_dims(gl.arange(0, C, layout=gl.SliceLayout(0, CHUNK_ROW)), 0)
    inside = row < gl.where(chunk == 0, count0, count1)
    channel = gl.expand_dims(gl.arange(0, D, layout=gl.SliceLayout(0, CHUNK_CHANNEL)), 0)
    lane = gl.expand_dims(channel, 1)
    first_chunk = gl.expand_dims(chunk == 0, 2)
    across = gl.expand_dims(row, 2)
    mask = gl.expand_dims(inside, 2) & (lane >= 0)
    ahead_tile = gl.allocate_shared_memory(gl.bfloat16, [ROWS, D], SHARED)
    behind_tile = gl.allocate_shared_memory(gl.bfloat16, [ROWS, D], SHARED)
    query_tile = gl.allocate_shared_memory(gl.bfloat16, [ROWS, D], SHARED)
    value_tile = gl.allocate_shared_memory(gl.bfloat16, [ROWS, D], SHARED)
    # All operands are under way at once and occupy no register. A thread turns its own elements of a tile, in place.
    copy_rows(ahead_tile, k, sequence0, first0, count0, sequence1, first1, count1, head, K_STRIDE, ROW_TILE)
    if GATE_IN_TILE:
        copy_rows(behind_tile, g, sequence0, first0, count0, sequence1, first1, count1, head, G_STRIDE, ROW_TILE)
    async_copy.commit_group()
    copy_rows(query_tile, q, sequence0, first0, count0, sequence1, first1, count1, head, Q_STRIDE, ROW_TILE)
    copy_rows(value_tile, v, sequence0, first0, count0, sequence1, first1, count1, head, V_STRIDE, ROW_TILE)
    async_copy.commit_group()
    if GATE_IN_TILE:
        async_copy.wait_group(1)
        gate = own_rows(behind_tile, ROW_TILE, TILE)
    else:
        start0 = sequence0.to(gl.int64) * G_STRIDE[0] + first0.to(gl.int64) * G_STRIDE[1]
        start1 = sequence1.to(gl.int64) * G_STRIDE[0] + first1.to(gl.int64) * G_STRIDE[1]
        place = g + head * G_STRIDE[2] + gl.where(first_chunk, start0, start1)
        gate = gl.load(place + (across * G_STRIDE[1] + lane * G_STRIDE[3]), mask=mask, other=0.0).to(gl.float32)
        async_copy.wait_group(1)

    # In base 2 from here: the gate is linear in its bound.
    if a_log is not None:
        rate = gl.exp(gl.load(a_log + head * RATE_STRIDE).to(gl.float32))
        bias = gl.load(dt_bias + head * BIAS_STRIDE[0] + channel * BIAS_STRIDE[1]).to(gl.float32)
        gate = log_decay(gate + gl.expand_dims(bias, 1), rate, LOWER_BOUND * 1.4426950408889634)
        gate = gl.where(mask, gate, 0.0)
    else:
        gate = gate * 1.4426950408889634
    total = gl.sum(gate, 1)
    middle = 0.5 * total
    since = gl.associative_scan(gate, 1, add) - gl.expand_dims(middle, 1)
    half = gl.expand_dims(gl.exp2(middle), 1)
    # Scratch of the second slot follows that of the first by H heads.
    base = (slot * H + head).to(gl.int64)
    later = gl.expand_dims(chunk, 2)
    wide = (later * (H * C) + across) * D + lane
    stacked = (later * (H * 2 * C) + across) * D + lane
    later_channel = gl.expand_dims(gl.arange(0, 2, layout=gl.SliceLayout(1, CHUNK_CHANNEL)), 1)
    gl.store(decays + base * D + later_channel * (H * D) + channel, gl.exp2(total))

    key = own_rows(ahead_tile, ROW_TILE, TILE)
    if L2_NORM:
        key = key * gl.expand_dims(gl.rsqrt(gl.sum(key * key, 2) + L2_EPS), 2)
    behind = key * gl.exp2(-since)
    behind_tile.store(gl.reshape(behind.to(gl.bfloat16), [ROWS, D]))
    gl.store(writes + base * (C * D) + wide, (behind * half).to(gl.bfloat16))
    ahead = gl.exp2(since)
    ahead_tile.store(gl.reshape((key * ahead).to(gl.bfloat16), [ROWS, D]))
    async_copy.wait_group(0)
    query = own_rows(query_tile, ROW_TILE, TILE)
    if L2_NORM:
        query = query * gl.expand_dims(gl.rsqrt(gl.sum(query * query, 2) + L2_EPS) * SCALE, 2)
    else:
        query = query * SCALE
    query = query * ahead
    query_tile.store(gl.reshape(query.to(gl.bfloat16), [ROWS, D]))
    # W above R: a slot has 2 C rows.
    gl.store(reads + base * (2 * C * D) + C * D + stacked, (query * half).to(gl.bfloat16))
    fence_async_shared()
    tl.debug_barrier()

    zeros = gl.zeros([ROWS, ROWS], gl.float32, layout=SQUARE)
    behind_turned = behind_tile.permute((1, 0))
    pairs_k = warpgroup_mma(ahead_tile, behind_turned, zeros, use_acc=False, is_async=True)
    pairs_q = warpgroup_mma(query_tile, behind_turned, zeros, use_acc=False, is_async=True)
    i_row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, SQUARE))
    j_row = gl.arange(0, ROWS, layout=gl.SliceLayout(0, SQUARE))
    i = gl.expand_dims(i_row, 1)
    j = gl.expand_dims(j_row, 0)
    strength_i = strength_of(
        beta, a_log, i_row, head, first0, count0, sequence0, first1, count1, sequence1, C, BETA_STRIDE
    )
    strength_j = strength_of(
        beta, a_log, j_row, head, first0, count0, sequence0, first1, count1, sequence1, C, BETA_STRIDE
    )
    pairs_k = warpgroup_mma_wait(1, deps=[pairs_k])
    same = i // C == j // C
    strict = gl.where(same & (j < i), pairs_k * gl.expand_dims(strength_i, 1), 0.0)
    pairs_q = warpgroup_mma_wait(0, deps=[pairs_q])
    pair_place = pairs + base * (C * C) + ((i // C) * (H * C) + i % C) * C + j % C
    gl.store(pair_place, gl.where(j <= i, pairs_q, 0.0).to(gl.bfloat16), mask=same)
    # All products have read the query and key tiles before these turn into the inverse's scratch.
    tl.debug_barrier()
    scratch0 = query_tile._reinterpret(gl.float16, [2, ROWS, ROWS], SHARED_SQUARE)
    scratch1 = behind_tile._reinterpret(gl.float16, [2, ROWS, ROWS], SHARED_SQUARE)
    inverse = inverse_of_blocks(strict, scratch0, scratch1, SQUARE)
    solved = (inverse * gl.expand_dims(strength_j, 0)).to(gl.bfloat16)
    solved = gl.convert_layout(solved, gl.DotOperandLayout(operand_index=0, parent=WIDE, k_width=2))
    zeros_wide = gl.zeros([ROWS, D], gl.float32, layout=WIDE)
    erasing = warpgroup_mma(solved, ahead_tile, zeros_wide, use_acc=False, is_async=True)
    corrected = warpgroup_mma(solved, value_tile, zeros_wide, use_acc=False, is_async=True)
    erasing = warpgroup_mma_wait(1, deps=[erasing])
    # W = A (k exp(G)), of which the tile lacks the factor exp(T / 2) of each channel.
    tl.debug_barrier()
    STAGE: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    stage = behind_tile._reinterpret(gl.bfloat16, [ROWS, D], STAGE)
    stage.store(erasing.to(gl.bfloat16))
    corrected = warpgroup_mma_wait(0, deps=[corrected])
    tl.debug_barrier()
    gl.store(reads + base * (2 * C * D) + stacked, (own_rows(stage, ROW_TILE, TILE) * half).to(gl.bfloat16))
    stage_values = query_tile._reinterpret(gl.bfloat16, [ROWS, D], STAGE)
    stage_values.store(corrected.to(gl.bfloat16))
    tl.debug_barrier()
    gl.store(values + base * (C * D) + wide, own_rows(stage_values, ROW_TILE, TILE).to(gl.bfloat16))


@gluon.jit
def strength_of(
    beta,
    a_log,
    index,
    head,
    first0,
    count0,
    sequence0,
    first1,
    count1,
    sequence1,
    C: gl.constexpr,
    STRIDE: gl.constexpr,
):
    """The write strength of each of the 64 rows in the layout of ``index``, 0 where there is no token."""
    late = index >= C
    row = index % C
    inside = row < gl.where(late, count1, count0)
    token = gl.where(late, first1, first0) + row
    sequence = gl.where(late, sequence1, sequence0).to(gl.int64)
    place = beta + sequence * STRIDE[0] + token.to(gl.int64) * STRIDE[1] + head * STRIDE[2]
    value = gl.load(place, mask=inside, other=0.0).to(gl.float32)
    if a_log is not None:
        value = gl.where(inside, sigmoid(value), 0.0)
    return value
