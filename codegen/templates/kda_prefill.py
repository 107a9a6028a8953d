# pyright: basic
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
    T: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    CHUNKS: tl.constexpr,
    ALIGN: tl.constexpr,
    INITIAL_STRIDE: tl.constexpr,
    FINAL_STRIDE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    TILE_V: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """``TILE_V`` value channels of one (sequence, head): the state [K, TILE_V] stays in registers."""
    OPERAND: tl.constexpr = values.dtype.element_ty
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
        end = begin + T
    else:
        begin = tl.load(cu_seqlens + sequence).to(tl.int64)
        end = tl.load(cu_seqlens + sequence + 1).to(tl.int64)
        slot = first_slot(begin.to(tl.int32), sequence, C, ALIGN)
    row = tl.arange(0, C)
    # A counted loop: Triton 3.6 reasons wrongly about what a `while` carries along.
    chunks = ((end - begin + C - 1) // C).to(tl.int32)
    for _ in range(chunks):
        base = (slot * H + head).to(tl.int64)
        rows = base * (2 * C * BLOCK_K) + row[:, None] * BLOCK_K + in_k[None, :]
        erasing = tl.load(reads + rows)
        reading = tl.load(reads + C * BLOCK_K + rows)
        writing = tl.load(writes + base * (C * BLOCK_K) + row[:, None] * BLOCK_K + in_k[None, :])
        inner = tl.load(pairs + base * (C * C) + row[:, None] * C + row[None, :])
        value = tl.load(values + base * (C * BLOCK_V) + row[:, None] * BLOCK_V + in_v[None, :]).to(tl.float32)
        decay = tl.load(decays + base * BLOCK_K + in_k)
        narrowed = state.to(OPERAND) if not INTERPRET else state
        delta = value - product(erasing, narrowed, OPERAND, INTERPRET)
        result = product(reading, narrowed, OPERAND, INTERPRET) + product(inner, delta, OPERAND, INTERPRET)
        state = state * decay[:, None] + product(tl.trans(writing), delta, OPERAND, INTERPRET)
        token = begin + row
        offset = (token[:, None] * H + head) * V + in_v[None, :]
        inside = (token < end)[:, None] & (in_v < V)[None, :]
        tl.store(out + offset, narrow(result, out, INTERPRET), mask=inside)
        if deltas is not None:
            tl.store(deltas + offset, delta, mask=inside)
        begin += C
        slot += 1
    final_place = final_state + at * FINAL_STRIDE[0] + head * FINAL_STRIDE[1]
    final_place += in_k[:, None] * FINAL_STRIDE[2] + in_v[None, :] * FINAL_STRIDE[3]
    tl.store(final_place, state, mask=state_mask)


def launch(q, k, v, g, beta, initial_state=None, a_log=None, dt_bias=None, cu_seqlens=None, *, deltas=None):
    """The operator's tensors in schema order -> (out, final_state); ``deltas`` fp32 [B, T, H, V] receives every u."""
    scratch = {"dtype": getattr(torch, CONSTANTS["scratch"]), "device": q.device}
    reads, values, writes, pairs = (torch.empty(shape, **scratch) for shape in CONSTANTS["tiles"])
    decays = torch.empty(CONSTANTS["decays"], dtype=torch.float32, device=q.device)
    out = torch.empty(CONSTANTS["out"], dtype=v.dtype, device=q.device)
    final_state = torch.empty(CONSTANTS["final_state"], dtype=torch.float32, device=q.device)
    if not out.numel() and cu_seqlens is None:
        return out, final_state.zero_() if initial_state is None else final_state.copy_(initial_state)
    prepare_chunks[CONSTANTS["prepare_grid"]](
        q, k, v, g, beta, a_log, dt_bias, cu_seqlens, reads, values, writes, pairs, decays,
        **{**CONSTANTS["prepare_constants"], "INTERPRET": INTERPRET}, **CONSTANTS["prepare_options"],
    )  # fmt: skip
    scan_chunks[CONSTANTS["scan_grid"]](
        reads, values, writes, pairs, decays, cu_seqlens, initial_state, out, final_state, deltas,
        **{**CONSTANTS["scan_chunks"], "INTERPRET": INTERPRET}, **CONSTANTS["scan_options"],
    )  # fmt: skip
    return out, final_state
