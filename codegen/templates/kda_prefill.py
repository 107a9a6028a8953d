# pyright: basic, reportArgumentType=false
# Kernel text: inside @triton.jit, names are tensors of a language that type checkers do not know.
"""The gated delta rule over runs of tokens in two launches: chunks by themselves, then the state along each run.

The form for any size, type and device; ``kda_prefill_hopper`` has the second launch for heads of 128 on Hopper.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from triton import knobs

from kimigraph.codegen.templates.kda_chunk import first_slot, prepare_chunks
from kimigraph.codegen.templates.rounding import narrow, product

INTERPRET = knobs.runtime.interpret
CONSTANTS: dict[str, Any] = {}


@triton.jit
def scan_chunks(
    v,
    reads,
    writes,
    pairs,
    decays,
    cu_seqlens,
    initial_state,
    out,
    final_state,
    deltas,
    T: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    CHUNKS: tl.constexpr,
    V_STRIDE: tl.constexpr,
    INITIAL_STRIDE: tl.constexpr,
    FINAL_STRIDE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TILE_V: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """``TILE_V`` value channels of one (sequence, head): the state [K, TILE_V] stays in registers."""
    OPERAND: tl.constexpr = writes.dtype.element_ty
    tile = tl.program_id(0)
    head = tl.program_id(1)
    sequence = tl.program_id(2)
    in_k = tl.arange(0, BLOCK_K)
    in_v = tile * TILE_V + tl.arange(0, TILE_V)
    state_mask = (in_k < K)[:, None] & (in_v < V)[None, :]
    at = sequence.to(tl.int64)
    if initial_state is None:
        state = tl.zeros([BLOCK_K, TILE_V], tl.float32)
    else:
        # The strides are (sequence, head, key channel, value channel) in either layout.
        place = initial_state + at * INITIAL_STRIDE[0] + head * INITIAL_STRIDE[1]
        place = place + in_k[:, None] * INITIAL_STRIDE[2] + in_v[None, :] * INITIAL_STRIDE[3]
        state = tl.load(place, mask=state_mask, other=0.0).to(tl.float32)
    if cu_seqlens is None:
        slot = sequence * CHUNKS
        begin = at * T
        count = sequence * 0 + T
        value_row = v + at * V_STRIDE[0] + head * V_STRIDE[2]
    else:
        begin = tl.load(cu_seqlens + sequence).to(tl.int64)
        count = (tl.load(cu_seqlens + sequence + 1).to(tl.int64) - begin).to(tl.int32)
        slot = first_slot(begin.to(tl.int32), sequence, C)
        value_row = v + begin * V_STRIDE[1] + head * V_STRIDE[2]
    row = tl.arange(0, C)
    base = (slot * H + head).to(tl.int64)
    # A counted loop: Triton 3.6 reasons wrongly about what a `while` carries along.
    for chunk in range((count + C - 1) // C):
        inside = (chunk * C + row < count)[:, None] & (in_v < V)[None, :]
        value_place = value_row + (chunk * C + row).to(tl.int64)[:, None] * V_STRIDE[1] + in_v[None, :] * V_STRIDE[3]
        value = tl.load(value_place, mask=inside, other=0.0).to(tl.float32)
        rows = base * (2 * C * BLOCK_K) + row[:, None] * BLOCK_K + in_k[None, :]
        erasing = tl.load(reads + rows)
        reading = tl.load(reads + C * BLOCK_K + rows)
        writing = tl.load(writes + base * (C * BLOCK_K) + in_k[:, None] * C + row[None, :])
        decay = tl.load(decays + base * BLOCK_K + in_k)
        square = row[:, None] * C + row[None, :]
        narrowed = state.to(OPERAND) if not INTERPRET else state
        missed = value - product(erasing, narrowed, OPERAND, INTERPRET)
        token = begin + chunk * C + row
        offset = (token[:, None] * H + head) * V + in_v[None, :]
        if deltas is not None:
            solved = tl.load(pairs + base * (2 * C * C) + square)
            tl.store(deltas + offset, product(solved, missed, OPERAND, INTERPRET), mask=inside)
            inner = tl.load(pairs + base * (2 * C * C) + C * C + square)
        else:
            inner = tl.load(pairs + base * (C * C) + square)
        result = product(reading, narrowed, OPERAND, INTERPRET) + product(inner, missed, OPERAND, INTERPRET)
        state = state * decay[:, None] + product(writing, missed, OPERAND, INTERPRET)
        tl.store(out + offset, narrow(result, out, INTERPRET), mask=inside)
        base += H
    final_place = final_state + at * FINAL_STRIDE[0] + head * FINAL_STRIDE[1]
    final_place += in_k[:, None] * FINAL_STRIDE[2] + in_v[None, :] * FINAL_STRIDE[3]
    tl.store(final_place, state, mask=state_mask)


def launch(
    q, k, v, g, beta, initial_state=None, a_log=None, dt_bias=None, cu_seqlens=None, *, deltas=None, memory=torch
):
    """The operator's tensors in schema order -> (out, final_state); ``deltas`` fp32 [B, T, H, V] receives every u."""
    scratch = {"dtype": getattr(torch, CONSTANTS["scratch"]), "device": q.device}
    reads, writes, pairs = CONSTANTS["tiles"]
    reads, writes = memory.empty(reads, **scratch), memory.empty(writes, **scratch)
    pairs = memory.empty(pairs if deltas is None else (2, *pairs), **scratch)
    decays = memory.empty(CONSTANTS["decays"], dtype=torch.float32, device=q.device)
    out = memory.empty(CONSTANTS["out"], dtype=v.dtype, device=q.device)
    final_state = memory.empty(CONSTANTS["final_state"], dtype=torch.float32, device=q.device)
    if not out.numel() and cu_seqlens is None:
        return out, final_state.zero_() if initial_state is None else final_state.copy_(initial_state)
    prepare_chunks[CONSTANTS["prepare_grid"]](
        q, k, g, beta, a_log, dt_bias, cu_seqlens, reads, writes, pairs, decays, DELTAS=deltas is not None,
        **{**CONSTANTS["prepare_constants"], "INTERPRET": INTERPRET}, **CONSTANTS["prepare_options"],
    )  # fmt: skip
    scan_chunks[CONSTANTS["scan_grid"]](
        v, reads, writes, pairs, decays, cu_seqlens, initial_state, out, final_state, deltas,
        **{**CONSTANTS["scan_chunks"], "INTERPRET": INTERPRET}, **CONSTANTS["scan_options"],
    )  # fmt: skip
    return out, final_state
