# pyright: basic, reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false
# Kernel text: inside @gluon.jit, names are tensors and constants of a language whose types say little to a checker.
"""The gated delta rule over runs of tokens for heads of 128 on Hopper: chunks by themselves, then the states.

The second launch keeps a state in the accumulators of warp-group products and has the chunks' tiles brought to shared
memory by the tensor memory accelerator, ``STAGES`` - 1 chunks ahead.
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
from kimigraph.codegen.templates.kda_chunk_hopper import prepare_chunk_pairs

CONSTANTS: dict[str, Any] = {}


@gluon.jit
def fetch_chunk(
    reads,
    values,
    writes,
    pairs,
    read_tiles,
    value_tiles,
    write_tiles,
    pair_tiles,
    barriers,
    stage,
    base,
    column,
    wanted,
    C: gl.constexpr,
    BYTES: gl.constexpr,
):
    """Have the tiles of chunk ``base`` = slot * H + head copied to ``stage``."""
    barrier = barriers.index(stage)
    mbarrier.expect(barrier, BYTES, pred=wanted)
    tma.async_copy_global_to_shared(reads, [base * (2 * C), 0], barrier, read_tiles.index(stage), pred=wanted)
    tma.async_copy_global_to_shared(values, [base * C, column], barrier, value_tiles.index(2 * stage), pred=wanted)
    tma.async_copy_global_to_shared(writes, [base * C, 0], barrier, write_tiles.index(stage), pred=wanted)
    tma.async_copy_global_to_shared(pairs, [base * C, 0], barrier, pair_tiles.index(2 * stage + 1), pred=wanted)


@gluon.jit
def scan_chunks(
    reads,
    values,
    writes,
    pairs,
    decays,
    cu_seqlens,
    initial_state,
    out,
    final_state,
    deltas,
    T: gl.constexpr,
    H: gl.constexpr,
    CHUNKS: gl.constexpr,
    ALIGN: gl.constexpr,
    INITIAL_STRIDE: gl.constexpr,
    FINAL_STRIDE: gl.constexpr,
    TILE_V: gl.constexpr,
    STAGES: gl.constexpr,
):
    """``TILE_V`` value channels of one (sequence, head), in one warp group.

    A product has 64 rows at least, twice a chunk's: W and R are read as one tile, and P lies in the lower half of a
    tile whose upper half gives rows of the result that nobody reads.
    """
    D: gl.constexpr = 128
    C: gl.constexpr = 32
    BYTES: gl.constexpr = 2 * (3 * C * D + C * C + C * TILE_V)
    ACC: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, TILE_V, 16])
    STATE_TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([D, TILE_V], gl.bfloat16)
    read_tiles = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 2 * C, D], reads.layout)
    write_tiles = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, D], writes.layout)
    pair_tiles = gl.allocate_shared_memory(gl.bfloat16, [2 * STAGES, C, C], pairs.layout)
    stacked_pairs = pair_tiles._reinterpret(gl.bfloat16, [STAGES, 2 * C, C], pairs.layout)
    value_tiles = gl.allocate_shared_memory(gl.bfloat16, [2 * STAGES, C, TILE_V], values.layout)
    stacked_values = value_tiles._reinterpret(gl.bfloat16, [STAGES, 2 * C, TILE_V], values.layout)
    state_tiles = gl.allocate_shared_memory(gl.bfloat16, [2, D, TILE_V], STATE_TILE)
    delta_tiles = gl.allocate_shared_memory(gl.bfloat16, [2, C, TILE_V], values.layout)
    stacked_deltas = delta_tiles._reinterpret(gl.bfloat16, [2 * C, TILE_V], values.layout)
    barriers = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())

    tile = gl.program_id(0)
    head = gl.program_id(1)
    sequence = gl.program_id(2)
    if cu_seqlens is None:
        slot = sequence * CHUNKS
        begin = sequence.to(gl.int64) * T
        count = sequence * 0 + T
    else:
        begin = gl.load(cu_seqlens + sequence).to(gl.int64)
        count = (gl.load(cu_seqlens + sequence + 1).to(gl.int64) - begin).to(gl.int32)
        slot = first_slot(begin.to(gl.int32), sequence, C, ALIGN)
    chunks = (count + C - 1) // C
    base = slot * H + head
    column = tile * TILE_V
    for stage in gl.static_range(STAGES):
        mbarrier.init(barriers.index(stage), count=1)
    fence_async_shared()
    tl.debug_barrier()
    for stage in gl.static_range(STAGES - 1):
        fetch_chunk(
            reads, values, writes, pairs, read_tiles, value_tiles, write_tiles, pair_tiles, barriers, stage,
            base + stage * H, column, stage < chunks, C, BYTES,
        )  # fmt: skip
    in_k = gl.arange(0, D, layout=gl.SliceLayout(1, ACC))
    in_v = column + gl.arange(0, TILE_V, layout=gl.SliceLayout(0, ACC))
    if initial_state is None:
        state = gl.zeros([D, TILE_V], gl.float32, layout=ACC)
    else:
        place = initial_state + sequence.to(gl.int64) * INITIAL_STRIDE[0] + head * INITIAL_STRIDE[1]
        place = place + gl.expand_dims(in_k * INITIAL_STRIDE[2], 1) + gl.expand_dims(in_v * INITIAL_STRIDE[3], 0)
        state = gl.load(place).to(gl.float32)
    state_tiles.index(0).store(state.to(gl.bfloat16))
    decay_row = decays + base.to(gl.int64) * D + in_k
    decay = gl.load(decay_row, mask=(in_k >= 0) & (chunks > 0), other=0.0)
    fence_async_shared()
    tl.debug_barrier()

    row = gl.arange(0, 2 * C, layout=gl.SliceLayout(1, ACC))
    result_row = out + ((begin + row - C) * H + head) * D
    result_place = gl.expand_dims(result_row, 1) + gl.expand_dims(in_v, 0)
    zeros = gl.zeros([2 * C, TILE_V], gl.float32, layout=ACC)
    for chunk in range(chunks):
        at = chunk % STAGES
        mbarrier.wait(barriers.index(at), (chunk // STAGES) & 1)
        # W S over R S
        sums = warpgroup_mma(read_tiles.index(at), state_tiles.index(chunk % 2), zeros, use_acc=False, is_async=True)
        value = stacked_values.index(at).load(ACC).to(gl.float32)
        state = state * gl.expand_dims(decay, 1)
        decay_row += H * D
        decay = gl.load(decay_row, mask=(in_k >= 0) & (chunk + 1 < chunks), other=0.0)
        sums = warpgroup_mma_wait(0, deps=[sums])
        delta = value - sums
        stacked_deltas.store(delta.to(gl.bfloat16))
        fence_async_shared()
        tl.debug_barrier()
        state = warpgroup_mma(write_tiles.index(at).permute((1, 0)), delta_tiles.index(0), state, is_async=True)
        sums = warpgroup_mma(stacked_pairs.index(at), delta_tiles.index(0), sums, is_async=True)
        ahead = chunk + STAGES - 1
        fetch_chunk(
            reads, values, writes, pairs, read_tiles, value_tiles, write_tiles, pair_tiles, barriers, ahead % STAGES,
            base + ahead * H, column, ahead < chunks, C, BYTES,
        )  # fmt: skip
        if deltas is not None:
            rows = gl.expand_dims(row < gl.minimum(count - chunk * C, C), 1)
            delta_row = deltas + ((begin + chunk * C + row) * H + head) * D
            gl.store(gl.expand_dims(delta_row, 1) + gl.expand_dims(in_v, 0), delta, mask=rows)
        state = warpgroup_mma_wait(1, deps=[state])
        # The other state tile: the products that read this one may still be under way in another warp.
        state_tiles.index((chunk + 1) % 2).store(state.to(gl.bfloat16))
        fence_async_shared()
        tl.debug_barrier()
        sums = warpgroup_mma_wait(0, deps=[sums])
        rows = gl.expand_dims((row >= C) & (row - C < count - chunk * C), 1)
        gl.store(result_place, sums.to(out.dtype.element_ty), mask=rows)
        result_place += C * H * D
    final_place = final_state + sequence.to(gl.int64) * FINAL_STRIDE[0] + head * FINAL_STRIDE[1]
    final_place += gl.expand_dims(in_k * FINAL_STRIDE[2], 1) + gl.expand_dims(in_v * FINAL_STRIDE[3], 0)
    gl.store(final_place, state)
    for stage in gl.static_range(STAGES):
        mbarrier.invalidate(barriers.index(stage))


def tiles_of(tensor, rows, columns):
    """A descriptor of the matrix of all rows, for tiles of ``rows`` by ``columns`` of it."""
    block = [rows, columns]
    layout = gl.NVMMASharedLayout.get_default_for(block, gl.bfloat16)
    return TensorDescriptor.from_tensor(tensor.view(-1, tensor.shape[-1]), block, layout)


def launch(q, k, v, g, beta, initial_state=None, a_log=None, dt_bias=None, cu_seqlens=None, *, deltas=None):
    """The operator's tensors in schema order -> (out, final_state); ``deltas`` fp32 [B, T, H, V] receives every u."""
    scratch = {"dtype": torch.bfloat16, "device": q.device}
    reads, values, writes, pairs = (torch.empty(shape, **scratch) for shape in CONSTANTS["tiles"])
    decays = torch.empty(CONSTANTS["decays"], dtype=torch.float32, device=q.device)
    out = torch.empty(CONSTANTS["out"], dtype=v.dtype, device=q.device)
    final_state = torch.empty(CONSTANTS["final_state"], dtype=torch.float32, device=q.device)
    prepare = prepare_chunk_pairs if CONSTANTS["prepare"] == "prepare_chunk_pairs" else prepare_chunks
    prepare[CONSTANTS["prepare_grid"]](
        q, k, v, g, beta, a_log, dt_bias, cu_seqlens, reads, values, writes, pairs, decays,
        **CONSTANTS["prepare_constants"], **CONSTANTS["prepare_options"],
    )  # fmt: skip
    tile_v, chunk = CONSTANTS["scan_chunks"]["TILE_V"], pairs.shape[-1]
    scan_chunks[CONSTANTS["scan_grid"]](
        tiles_of(reads, 2 * chunk, 128), tiles_of(values, chunk, tile_v), tiles_of(writes, chunk, 128),
        tiles_of(pairs, chunk, chunk), decays, cu_seqlens, initial_state, out, final_state, deltas,
        **CONSTANTS["scan_chunks"], **CONSTANTS["scan_options"],
    )  # fmt: skip
    return out, final_state
