# pyright: basic, reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false
# Kernel text: inside @gluon.jit, names are tensors and constants of a language whose types say little to a checker.
"""The gated delta rule over runs of tokens for heads of 128 on Hopper: chunks by themselves, then the states.

In the second launch a warp group keeps the state [64 value channels, K] in its registers, where it is the accumulator
of one product and, in 16 bits, the left operand of the next: from chunk to chunk nothing of it passes through shared
memory. One more warp has the chunks' tiles brought there by the tensor memory accelerator, ``STAGES`` ahead at most.
"""

from typing import Any

import torch
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kimigraph.codegen.templates.kda_chunk import first_slot, prepare_chunks
from kimigraph.codegen.templates.kda_chunk_hopper import prepare_chunks_in_shared

CONSTANTS: dict[str, Any] = {}


@gluon.jit
def fetch_chunks(
    reads,
    values,
    writes,
    pairs,
    decays,
    read_tiles,
    value_tiles,
    write_tiles,
    pair_tiles,
    decay_tiles,
    full,
    free,
    base,
    token,
    column,
    chunks,
    H: gl.constexpr,
    BYTES: gl.constexpr,
):
    """One warp: the tiles of every chunk in turn, ``base`` = slot * H + head, as stages fall free."""
    C: gl.constexpr = 32
    STAGES: gl.constexpr = full.shape[0]
    PAIRS: gl.constexpr = pair_tiles.shape[0] // STAGES
    for chunk in range(chunks):
        stage = chunk % STAGES
        mbarrier.wait(free.index(stage), ((chunk // STAGES) & 1) ^ 1)
        barrier = full.index(stage)
        mbarrier.expect(barrier, BYTES)
        tma.async_copy_global_to_shared(reads, [base * (2 * C), 0], barrier, read_tiles.index(stage))
        tma.async_copy_global_to_shared(values, [token, column], barrier, value_tiles.index(stage))
        tma.async_copy_global_to_shared(decays, [base, 0], barrier, decay_tiles.index(stage))
        tma.async_copy_global_to_shared(writes, [base * 128, 0], barrier, write_tiles.index(stage))
        for part in gl.static_range(PAIRS):
            row = base * (PAIRS * C) + part * C
            tma.async_copy_global_to_shared(pairs, [row, 0], barrier, pair_tiles.index(PAIRS * stage + part))
        base += H
        token += C


@gluon.jit
def longest_first(cu_seqlens, place, SEQUENCES: gl.constexpr, BLOCK_N: gl.constexpr):
    """The sequence with ``place`` others ahead of it, of which none is shorter: what takes longest should begin first.

    With many sequences that is not worth the search, and they come as they are.
    """
    if cu_seqlens is None or SEQUENCES > 32:
        sequence = place
    else:
        GRID: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [gl.num_warps(), 1], [1, 0])
        i = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, GRID))
        j = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, GRID))
        length_i = length_of(cu_seqlens, i, SEQUENCES)
        length_j = gl.expand_dims(length_of(cu_seqlens, j, SEQUENCES), 0)
        length = gl.expand_dims(length_i, 1)
        ahead = (length_j > length) | ((length_j == length) & (gl.expand_dims(j, 0) < gl.expand_dims(i, 1)))
        sequence = gl.sum(gl.where(gl.sum(ahead.to(gl.int32), 1) == place, i, 0), 0)
    return sequence


@gluon.jit
def length_of(cu_seqlens, sequence, SEQUENCES: gl.constexpr):
    """Tokens of packed sequences; -1 past the last."""
    inside = sequence < SEQUENCES
    start = gl.load(cu_seqlens + sequence, mask=inside, other=1)
    return (gl.load(cu_seqlens + sequence + 1, mask=inside, other=0) - start).to(gl.int32)


@gluon.jit
def halves(sums, LAYOUT: gl.constexpr):
    """The left and the right half of the columns [V, 64], which a thread holds both of."""
    columns = gl.permute(gl.reshape(sums, [sums.shape[0], 2, 32]), (0, 2, 1))
    left, right = gl.split(columns)
    return gl.convert_layout(left, LAYOUT, assert_trivial=True), gl.convert_layout(right, LAYOUT, assert_trivial=True)


@gluon.jit
def pass_on(staged, narrowed, results, token, column, free):
    """Send the read-outs of a whole chunk to memory, and give back its stage."""
    staged.permute((1, 0)).store(narrowed)
    # The tile of the chunk before, which comes next, has been read.
    tma.store_wait(0)
    fence_async_shared()
    tl.debug_barrier()
    mbarrier.arrive(free)
    tma.async_copy_shared_to_global(results, [token, column], staged)


@gluon.jit
def carry_state(
    results,
    initial_state,
    out,
    final_state,
    deltas,
    read_tiles,
    value_tiles,
    write_tiles,
    pair_tiles,
    decay_tiles,
    result_tiles,
    full,
    free,
    begin,
    count,
    chunks,
    sequence,
    head,
    column,
    H: gl.constexpr,
    INITIAL_STRIDE: gl.constexpr,
    FINAL_STRIDE: gl.constexpr,
):
    """One warp group: the state through all chunks. Everything is turned, [value channel, key channel or token]."""
    C: gl.constexpr = 32
    D: gl.constexpr = 128
    STAGES: gl.constexpr = full.shape[0]
    PAIRS: gl.constexpr = pair_tiles.shape[0] // STAGES
    TILE_V: gl.constexpr = result_tiles.shape[2]
    WARPS: gl.constexpr = [TILE_V // 16, 1]
    STATE: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=WARPS, instr_shape=[16, D, 16])
    BOTH: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=WARPS, instr_shape=[16, 2 * C, 16])
    TOKENS: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=WARPS, instr_shape=[16, C, 16])
    in_v = gl.arange(0, TILE_V, layout=gl.SliceLayout(1, STATE))
    in_k = gl.arange(0, D, layout=gl.SliceLayout(0, STATE))
    if initial_state is None:
        state = gl.zeros([TILE_V, D], gl.float32, layout=STATE)
    else:
        place = initial_state + sequence.to(gl.int64) * INITIAL_STRIDE[0] + head * INITIAL_STRIDE[1]
        place = place + gl.expand_dims(in_k * INITIAL_STRIDE[2], 0)
        state = gl.load(place + gl.expand_dims((column + in_v) * INITIAL_STRIDE[3], 1)).to(gl.float32)
    zeros = gl.zeros([TILE_V, C], gl.float32, layout=TOKENS)
    zeros_both = gl.zeros([TILE_V, 2 * C], gl.float32, layout=BOTH)
    v_row = gl.expand_dims(column + gl.arange(0, TILE_V, layout=gl.SliceLayout(1, TOKENS)), 1)
    t_row = gl.arange(0, C, layout=gl.SliceLayout(0, TOKENS))
    token = begin.to(gl.int32)
    narrow_result = zeros.to(gl.bfloat16)
    for chunk in range(chunks):
        at = chunk % STAGES
        left = count - chunk * C
        mbarrier.wait(full.index(at), (chunk // STAGES) & 1)
        narrowed = gl.convert_layout(
            state.to(gl.bfloat16), gl.DotOperandLayout(operand_index=0, parent=BOTH, k_width=2)
        )
        sums = warpgroup_mma(narrowed, read_tiles.index(at).permute((1, 0)), zeros_both, use_acc=False, is_async=True)
        if chunk > 0:
            pass_on(
                result_tiles.index((chunk + 1) % 2), narrow_result, results, token - C, head * D + column,
                free.index((chunk + STAGES - 1) % STAGES),
            )  # fmt: skip
        value = value_tiles.index(at).permute((1, 0)).load(TOKENS).to(gl.float32)
        state = state * decay_tiles.index(at).load(STATE)
        sums = warpgroup_mma_wait(0, deps=[sums])
        recalled, read = halves(sums, TOKENS)
        # Rows behind the last token are another sequence's.
        missed = gl.where(gl.expand_dims(t_row < left, 0), value - recalled, 0.0).to(gl.bfloat16)
        error = gl.convert_layout(missed, gl.DotOperandLayout(operand_index=0, parent=STATE, k_width=2))
        state = warpgroup_mma(error, write_tiles.index(at).permute((1, 0)), state, is_async=True)
        error = gl.convert_layout(missed, gl.DotOperandLayout(operand_index=0, parent=TOKENS, k_width=2))
        inner = pair_tiles.index(PAIRS * at + PAIRS - 1).permute((1, 0))
        written = warpgroup_mma(error, inner, zeros, use_acc=False, is_async=True)
        if deltas is not None:
            solved = pair_tiles.index(2 * at).permute((1, 0))
            delta = warpgroup_mma(error, solved, zeros, use_acc=False, is_async=True)
            delta = warpgroup_mma_wait(0, deps=[delta])
            delta_row = deltas + ((begin + chunk * C + t_row) * H + head) * D
            rows = gl.expand_dims(t_row < left, 0) & (v_row >= 0)
            gl.store(gl.expand_dims(delta_row, 0) + v_row, delta, mask=rows)
        state, written = warpgroup_mma_wait(0, deps=[state, written])
        narrow_result = (read + written).to(gl.bfloat16)
        token += C
    # The last chunk may be shorter than a tile.
    t_last = (chunks - 1) * C + t_row
    result_row = out + ((begin + t_last) * H + head) * D
    rows = gl.expand_dims((t_last >= 0) & (t_last < count), 0) & (v_row >= 0)
    gl.store(gl.expand_dims(result_row, 0) + v_row, narrow_result, mask=rows)
    final_place = final_state + sequence.to(gl.int64) * FINAL_STRIDE[0] + head * FINAL_STRIDE[1]
    final_place = final_place + gl.expand_dims(in_k * FINAL_STRIDE[2], 0)
    gl.store(final_place + gl.expand_dims((column + in_v) * FINAL_STRIDE[3], 1), state)
    tma.store_wait(0)


@gluon.jit
def scan_chunks(
    reads,
    values,
    writes,
    pairs,
    decays,
    results,
    cu_seqlens,
    initial_state,
    out,
    final_state,
    deltas,
    T: gl.constexpr,
    H: gl.constexpr,
    CHUNKS: gl.constexpr,
    SEQUENCES: gl.constexpr,
    BLOCK_N: gl.constexpr,
    INITIAL_STRIDE: gl.constexpr,
    FINAL_STRIDE: gl.constexpr,
    TILE_V: gl.constexpr,
    STAGES: gl.constexpr,
):
    """``TILE_V`` value channels of one (sequence, head)."""
    C: gl.constexpr = 32
    D: gl.constexpr = 128
    PAIRS: gl.constexpr = 1 if deltas is None else 2
    BYTES: gl.constexpr = 2 * (3 * C * D + PAIRS * C * C + C * TILE_V) + 4 * D
    read_tiles = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 2 * C, D], reads.layout)
    write_tiles = gl.allocate_shared_memory(gl.bfloat16, [STAGES, D, C], writes.layout)
    pair_tiles = gl.allocate_shared_memory(gl.bfloat16, [PAIRS * STAGES, C, C], pairs.layout)
    value_tiles = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, TILE_V], values.layout)
    result_tiles = gl.allocate_shared_memory(gl.bfloat16, [2, C, TILE_V], results.layout)
    decay_tiles = gl.allocate_shared_memory(gl.float32, [STAGES, 1, D], decays.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    tile = gl.program_id(0)
    head = gl.program_id(1)
    sequence = longest_first(cu_seqlens, gl.program_id(2), SEQUENCES, BLOCK_N)
    if cu_seqlens is None:
        slot = sequence * CHUNKS
        begin = sequence.to(gl.int64) * T
        count = sequence * 0 + T
    else:
        begin = gl.load(cu_seqlens + sequence).to(gl.int64)
        count = (gl.load(cu_seqlens + sequence + 1).to(gl.int64) - begin).to(gl.int32)
        slot = first_slot(begin.to(gl.int32), sequence, C)
    chunks = (count + C - 1) // C
    column = tile * TILE_V
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(free.index(stage), count=1)
    fence_async_shared()
    tl.debug_barrier()
    gl.warp_specialize(
        [
            (
                carry_state,
                (
                    results, initial_state, out, final_state, deltas, read_tiles, value_tiles, write_tiles, pair_tiles,
                    decay_tiles, result_tiles, full, free, begin, count, chunks, sequence, head, column, H,
                    INITIAL_STRIDE, FINAL_STRIDE,
                ),
            ),
            (
                fetch_chunks,
                (
                    reads, values, writes, pairs, decays, read_tiles, value_tiles, write_tiles, pair_tiles, decay_tiles,
                    full, free, slot * H + head, begin.to(gl.int32), head * D + column, chunks, H, BYTES,
                ),
            ),
        ],
        [1],
        [24],
    )  # fmt: skip
    for stage in gl.static_range(STAGES):
        mbarrier.invalidate(full.index(stage))
        mbarrier.invalidate(free.index(stage))


def tiles_of(tensor, rows, columns):
    """A descriptor of the matrix of all rows, for tiles of ``rows`` by ``columns`` of it."""
    block = [rows, columns]
    if tensor.dtype == torch.float32:
        layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    else:
        layout = gl.NVMMASharedLayout.get_default_for(block, gl.bfloat16)
    return TensorDescriptor.from_tensor(tensor.view(-1, tensor.shape[-1]), block, layout)


def rows_of(v):
    """A token a row, [B * T, H * V]; what cannot be copied by tiles as it lies is copied first."""
    rows = v.flatten(2).flatten(0, 1)
    if rows.data_ptr() % 16 == 0 and rows.stride(0) % 8 == 0 and rows.stride(1) == 1:
        return rows
    return rows.clone(memory_format=torch.contiguous_format)


def launch(
    q, k, v, g, beta, initial_state=None, a_log=None, dt_bias=None, cu_seqlens=None, *, deltas=None, memory=torch
):
    """The operator's tensors in schema order -> (out, final_state); ``deltas`` fp32 [B, T, H, V] receives every u."""
    scratch = {"dtype": torch.bfloat16, "device": q.device}
    reads, writes, pairs = CONSTANTS["tiles"]
    reads, writes = memory.empty(reads, **scratch), memory.empty(writes, **scratch)
    pairs = memory.empty(pairs if deltas is None else (2, *pairs), **scratch)
    decays = memory.empty(CONSTANTS["decays"], dtype=torch.float32, device=q.device)
    out = memory.empty(CONSTANTS["out"], dtype=v.dtype, device=q.device)
    final_state = memory.empty(CONSTANTS["final_state"], dtype=torch.float32, device=q.device)
    in_shared = CONSTANTS["prepare"] == "prepare_chunks_in_shared"
    (prepare_chunks_in_shared if in_shared else prepare_chunks)[CONSTANTS["prepare_grid"]](
        q, k, g, beta, a_log, dt_bias, cu_seqlens, reads, writes, pairs, decays, DELTAS=deltas is not None,
        **CONSTANTS["prepare_constants"], **CONSTANTS["prepare_options"],
    )  # fmt: skip
    tile_v = CONSTANTS["scan_chunks"]["TILE_V"]
    scan_chunks[CONSTANTS["scan_grid"]](
        tiles_of(reads, 64, 128), tiles_of(rows_of(v), 32, tile_v), tiles_of(writes, 128, 32), tiles_of(pairs, 32, 32),
        tiles_of(decays, 1, 128), tiles_of(out.flatten(2), 32, tile_v), cu_seqlens, initial_state, out, final_state,
        deltas, **CONSTANTS["scan_chunks"], **CONSTANTS["scan_options"],
    )  # fmt: skip
    return out, final_state
