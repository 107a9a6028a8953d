# pyright: basic, reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false
# Kernel text: inside @gluon.jit, names are tensors and constants of a language whose types say little to a checker.
"""``kda_chunk`` for heads of 128 and a bounded gate on Hopper: a chunk of 32 tokens a program, by one warp group.

Warp-group products have 64 rows at least: keys and queries of a chunk are the halves of one tile, so that every product
that makes M makes P too, and the solution of the triangular system comes with Q = P A below it. Operands stay in shared
memory, so that several programs share a multiprocessor.
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma

from kimigraph.codegen.templates.kda_chunk import chunk_rows
from kimigraph.codegen.templates.kda_gate import log_decay, sigmoid


@gluon.jit
def add(a, b):
    """For scans."""
    return a + b


@gluon.jit
def add_pairs(a, b, c, d):
    """The sum of two pairs, for one reduction of two tensors."""
    return a + c, b + d


@gluon.jit
def copy_chunk(tile, tensor, sequence, first, count, head, STRIDE: gl.constexpr, TILE: gl.constexpr):
    """Have the chunk's rows of a [B, T, H, 128] tensor copied to ``tile`` [32, 128]; without a token they are zeros."""
    row = gl.expand_dims(gl.arange(0, 32, layout=gl.SliceLayout(1, TILE)), 1)
    lane = gl.expand_dims(gl.arange(0, 128, layout=gl.SliceLayout(0, TILE)), 0)
    start = sequence.to(gl.int64) * STRIDE[0] + first.to(gl.int64) * STRIDE[1] + head * STRIDE[2]
    place = tensor + start + (row * STRIDE[1] + lane * STRIDE[3])
    async_copy.async_copy_global_to_shared(tile, place, mask=(row < count) & (lane >= 0))


@gluon.jit
def strength_of(beta, a_log, sequence, first, count, head, STRIDE: gl.constexpr):
    """[64]: the write strength of each token of the chunk, 0 where there is none; twice, as rows of products are."""
    index = gl.arange(0, 64, layout=gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    row = index % 32
    place = beta + sequence.to(gl.int64) * STRIDE[0] + first.to(gl.int64) * STRIDE[1] + head * STRIDE[2]
    value = gl.load(place + row * STRIDE[1], mask=row < count, other=0.0).to(gl.float32)
    if a_log is not None:
        value = gl.where(row < count, sigmoid(value), 0.0)
    return value


@gluon.jit
def decay_of(
    logit,
    a_log,
    dt_bias,
    head,
    count,
    LOWER_BOUND: gl.constexpr,
    RATE_STRIDE: gl.constexpr,
    BIAS_STRIDE: gl.constexpr,
    TILE: gl.constexpr,
):
    """Log-decay in base 2 of logits [32, 128], or of log-decays without ``a_log``; 0 where there is no token."""
    if a_log is not None:
        row = gl.expand_dims(gl.arange(0, 32, layout=gl.SliceLayout(1, TILE)), 1)
        channel = gl.arange(0, 128, layout=gl.SliceLayout(0, TILE))
        rate = gl.exp(gl.load(a_log + head * RATE_STRIDE).to(gl.float32))
        bias = gl.load(dt_bias + head * BIAS_STRIDE[0] + channel * BIAS_STRIDE[1]).to(gl.float32)
        # The gate is linear in its bound.
        gate = log_decay(logit + gl.expand_dims(bias, 0), rate, LOWER_BOUND * 1.4426950408889634, CHEAP=True)
        if count < 32:
            gate = gl.where(row < count, gate, 0.0)
    else:
        gate = logit * 1.4426950408889634
    return gate


@gluon.jit
def solve_chunk(products, strengths, tiles, PAIRS: gl.constexpr):
    """[64, 32]: A over Q = P A, of ``products`` [64, 32], which are k . k over q . k, both decayed.

    The strict triangle's inverse doubles its blocks of rows as in ``inverse_of_unit_lower``: with X the inverse of the
    blocks on the diagonal and L what lies below them in pairs of blocks, X <- X - X L X. The rows of P go along, as
    Y <- Y - Y L X. ``tiles``: scratch for L of the five levels and for two X in turn, so that a barrier orders a level.
    """
    C: gl.constexpr = 32
    SOLVE: gl.constexpr = tiles[0].dtype
    OPERAND: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=PAIRS, k_width=2)
    i = gl.expand_dims(gl.arange(0, 2 * C, layout=gl.SliceLayout(1, PAIRS)), 1)
    j = gl.expand_dims(gl.arange(0, C, layout=gl.SliceLayout(0, PAIRS)), 0)
    zeros = gl.zeros([2 * C, C], gl.float32, layout=PAIRS)
    strength = gl.expand_dims(strengths.load(gl.SliceLayout(1, PAIRS)), 1)
    strict = gl.where(j < i, products * strength, 0.0)
    solved = gl.where(i >= C, gl.where(j <= i - C, products, 0.0), gl.where(i == j, 1.0, 0.0))
    # A pair of rows belongs to the level of the highest bit in which their numbers differ.
    apart = i ^ j
    for level in gl.static_range(5):
        tiles[level].store(gl.where(apart >> level == 1, strict, 0.0).to(SOLVE))
    fence_async_shared()
    tl.debug_barrier()
    narrowed = gl.convert_layout(solved.to(SOLVE), OPERAND)
    solved = solved - warpgroup_mma(narrowed, tiles[0].slice(0, C, 0), zeros, use_acc=False)
    for level in gl.static_range(1, 5):
        narrowed = solved.to(SOLVE)
        old = tiles[5 + level % 2]
        old.store(narrowed)
        fence_async_shared()
        tl.debug_barrier()
        left = warpgroup_mma(gl.convert_layout(narrowed, OPERAND), tiles[level].slice(0, C, 0), zeros, use_acc=False)
        left = gl.convert_layout(left.to(SOLVE), OPERAND)
        solved = solved - warpgroup_mma(left, old.slice(0, C, 0), zeros, use_acc=False)
    return solved * gl.expand_dims(strengths.slice(0, C, 0).load(gl.SliceLayout(0, PAIRS)), 0)


@gluon.jit
def prepare_rows(
    q,
    k,
    g,
    beta,
    a_log,
    dt_bias,
    reads,
    writes,
    pairs,
    decays,
    head,
    slot,
    sequence,
    first,
    count,
    H: gl.constexpr,
    SCALE: gl.constexpr,
    L2_NORM: gl.constexpr,
    L2_EPS: gl.constexpr,
    LOWER_BOUND: gl.constexpr,
    Q_STRIDE: gl.constexpr,
    K_STRIDE: gl.constexpr,
    G_STRIDE: gl.constexpr,
    BETA_STRIDE: gl.constexpr,
    RATE_STRIDE: gl.constexpr,
    BIAS_STRIDE: gl.constexpr,
    DELTAS: gl.constexpr,
    GATE_IN_TILE: gl.constexpr,
):
    """The scratch of ``count`` tokens of one sequence and head, from token ``first`` on."""
    C: gl.constexpr = 32
    D: gl.constexpr = 128
    # A warp has all tokens of 32 channels, a thread four in a row: sums over tokens are mostly its own.
    TILE: gl.constexpr = gl.BlockedLayout([4, 8], [8, 4], [1, 4], [1, 0])
    LINE: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0])
    PAIRS: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, C, 16])
    # Entries of the inverse are about one at most, as are unit keys: fp16 has three bits more than bf16.
    SOLVE: gl.constexpr = gl.float16 if L2_NORM else gl.bfloat16
    SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, D], gl.bfloat16)
    SHARED_SQUARE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([2 * C, C], gl.float16)
    both = gl.allocate_shared_memory(gl.bfloat16, [2 * C, D], SHARED)
    behind_tile = gl.allocate_shared_memory(gl.bfloat16, [C, D], SHARED)
    key_tile = both.slice(0, C, 0)
    query_tile = both.slice(C, C, 0)
    # All operands are under way at once and occupy no register; a thread reads what it copied itself.
    if GATE_IN_TILE:
        copy_chunk(behind_tile, g, sequence, first, count, head, G_STRIDE, TILE)
    async_copy.commit_group()
    copy_chunk(key_tile, k, sequence, first, count, head, K_STRIDE, TILE)
    copy_chunk(query_tile, q, sequence, first, count, head, Q_STRIDE, TILE)
    async_copy.commit_group()
    strengths = gl.allocate_shared_memory(gl.float32, [2 * C], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    strengths.store(strength_of(beta, a_log, sequence, first, count, head, BETA_STRIDE))
    row = gl.expand_dims(gl.arange(0, C, layout=gl.SliceLayout(1, TILE)), 1)
    channel = gl.arange(0, D, layout=gl.SliceLayout(0, TILE))
    lane = gl.expand_dims(channel, 0)
    if GATE_IN_TILE:
        async_copy.wait_group(1)
        logit = behind_tile.load(TILE).to(gl.float32)
    else:
        start = sequence.to(gl.int64) * G_STRIDE[0] + first.to(gl.int64) * G_STRIDE[1] + head * G_STRIDE[2]
        place = g + start + (row * G_STRIDE[1] + lane * G_STRIDE[3])
        logit = gl.load(place, mask=(row < count) & (lane >= 0), other=0.0).to(gl.float32)
    gate = decay_of(logit, a_log, dt_bias, head, count, LOWER_BOUND, RATE_STRIDE, BIAS_STRIDE, TILE)
    # Half of the chunk's decay either way stays inside fp32's exponents; see ``bounded_factors``.
    total = gl.sum(gate, 0)
    middle = 0.5 * total
    half = gl.expand_dims(gl.exp2(middle), 0)
    since = gl.associative_scan(gate, 0, add) - gl.expand_dims(middle, 0)
    ahead = gl.exp2(since)
    async_copy.wait_group(0)
    key = key_tile.load(TILE).to(gl.float32)
    query = query_tile.load(TILE).to(gl.float32)
    if L2_NORM:
        squares_k, squares_q = gl.reduce((key * key, query * query), 1, add_pairs)
        key = key * gl.expand_dims(gl.rsqrt(squares_k + L2_EPS), 1)
        query = query * gl.expand_dims(gl.rsqrt(squares_q + L2_EPS) * SCALE, 1)
    else:
        query = query * SCALE
    behind = key * gl.exp2(-since)
    key = key * ahead
    query = query * ahead
    behind_tile.store(behind.to(gl.bfloat16))
    stacked = gl.permute(gl.join(key.to(gl.bfloat16), query.to(gl.bfloat16)), (2, 0, 1))
    both.store(gl.reshape(stacked, [2 * C, D]))
    written = (behind * half).to(SOLVE)
    base = (slot * H + head).to(gl.int64)
    read_place = reads + base * (2 * C * D) + (row * D + lane)
    gl.store(read_place, (key * half).to(gl.bfloat16))
    gl.store(read_place + C * D, (query * half).to(gl.bfloat16))
    gl.store(decays + base * D + channel, gl.exp2(total))
    fence_async_shared()
    tl.debug_barrier()

    zeros = gl.zeros([2 * C, C], gl.float32, layout=PAIRS)
    products = warpgroup_mma(both, behind_tile.permute((1, 0)), zeros, use_acc=False)
    # Tiles of their own: the compiler orders all accesses to one by barriers.
    tiles = ()
    for _ in gl.static_range(7):
        tiles = tiles + (gl.allocate_shared_memory(SOLVE, [2 * C, C], SHARED_SQUARE),)
    solved = solve_chunk(products, strengths, tiles, PAIRS)
    i = gl.expand_dims(gl.arange(0, 2 * C, layout=gl.SliceLayout(1, PAIRS)), 1)
    j = gl.expand_dims(gl.arange(0, C, layout=gl.SliceLayout(0, PAIRS)), 0)
    if DELTAS:
        gl.store(pairs + base * (2 * C * C) + (i * C + j), solved.to(gl.bfloat16))
    else:
        place = pairs + base * (C * C) + ((i - C) * C + j)
        gl.store(place, solved.to(gl.bfloat16), mask=(i >= C) & (j >= 0))
    tiles[0].store(solved.to(SOLVE))
    write_tile = behind_tile._reinterpret(SOLVE, [C, D], SHARED)
    write_tile.store(written)
    fence_async_shared()
    tl.debug_barrier()
    zeros = gl.zeros([D, C], gl.float32, layout=PAIRS)
    turned = warpgroup_mma(write_tile.permute((1, 0)), tiles[0].slice(0, C, 0), zeros, use_acc=False)
    stage = both._reinterpret(gl.bfloat16, [2, D, C], SHARED_SQUARE).index(0)
    stage.store(turned.to(gl.bfloat16))
    tl.debug_barrier()
    line = gl.expand_dims(gl.arange(0, D, layout=gl.SliceLayout(1, LINE)), 1) * C
    line = line + gl.expand_dims(gl.arange(0, C, layout=gl.SliceLayout(0, LINE)), 0)
    gl.store(writes + base * (C * D) + line, stage.load(LINE))


@gluon.jit
def prepare_chunks_in_shared(
    q,
    k,
    g,
    beta,
    a_log,
    dt_bias,
    cu_seqlens,
    reads,
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
    G_STRIDE: gl.constexpr,
    BETA_STRIDE: gl.constexpr,
    RATE_STRIDE: gl.constexpr,
    BIAS_STRIDE: gl.constexpr,
    BLOCK_N: gl.constexpr,
    DELTAS: gl.constexpr,
    GATE_IN_TILE: gl.constexpr,
):
    """The scratch of ``prepare_chunks`` for one slot and head."""
    C: gl.constexpr = 32
    head = gl.program_id(0)
    slot = gl.program_id(1)
    entry = gl.arange(0, BLOCK_N, layout=gl.BlockedLayout([1], [32], [4], [0]))
    first, count, sequence = chunk_rows(cu_seqlens, slot, entry, T, CHUNKS, SEQUENCES, C)
    # What is known to be whole needs no masks, whose registers would cost a program the multiprocessor.
    if count == C:
        prepare_rows(
            q, k, g, beta, a_log, dt_bias, reads, writes, pairs, decays, head, slot, sequence, first, C, H, SCALE,
            L2_NORM, L2_EPS, LOWER_BOUND, Q_STRIDE, K_STRIDE, G_STRIDE, BETA_STRIDE, RATE_STRIDE, BIAS_STRIDE, DELTAS,
            GATE_IN_TILE,
        )  # fmt: skip
    elif count > 0:
        prepare_rows(
            q, k, g, beta, a_log, dt_bias, reads, writes, pairs, decays, head, slot, sequence, first, count, H, SCALE,
            L2_NORM, L2_EPS, LOWER_BOUND, Q_STRIDE, K_STRIDE, G_STRIDE, BETA_STRIDE, RATE_STRIDE, BIAS_STRIDE, DELTAS,
            GATE_IN_TILE,
        )  # fmt: skip
