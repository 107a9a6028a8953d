# pyright: basic, reportAssignmentType=false, reportGeneralTypeIssues=false
# Kernel text: inside @triton.jit, names are tensors of a language that type checkers do not know.
"""Absorbed MLA attention of 512 + 64 columns over listed cache rows in one launch on Hopper.

SPLITS programs share the list of 64 heads of a query row. Each runs an online softmax (base 2) over its part; once all
have, each joins the parts for some of the heads. They must run at once, hence the cooperative launch. With STAGE >= 0 a
launch does one of the two steps, which is how the interpreter goes through the same code.
"""

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton import knobs

from kimigraph.codegen.templates.cache_rows import cache_parts, row_offsets
from kimigraph.codegen.templates.fp8_bytes import e4m3_value
from kimigraph.codegen.templates.meeting import meet, row_state
from kimigraph.codegen.templates.rounding import narrow

INTERPRET = knobs.runtime.interpret
CONSTANTS: dict[str, Any] = {}


@triton.jit
def two_halves(scale):
    """fp32 -> two bf16 that add up to its first 16 bits of mantissa, each twice in the 32 bits of an int."""
    bits = scale.to(tl.uint32, bitcast=True)
    high = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    low = (scale - high.to(tl.float32, bitcast=True)).to(tl.uint32, bitcast=True) & 0xFFFF0000
    return (high | (high >> 16)).to(tl.int32, bitcast=True), (low | (low >> 16)).to(tl.int32, bitcast=True)


@triton.jit
def scaled_e4m3(bits, high, low):
    """Four e4m3 bytes at a time -> bf16 of value * scale; ``high`` and ``low`` are ``two_halves(scale * 2 ** 120)``.

    Sign, exponent and mantissa move to their bf16 places as they are, which makes the value 2 ** -120 times too small.
    """
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 a0, a1, t0, t1, m0, m1;
        prmt.b32 t0, $2, 0, 0x1404;
        prmt.b32 t1, $2, 0, 0x3424;
        shr.u32 a0, t0, 4;
        shr.u32 a1, t1, 4;
        and.b32 a0, a0, 0x07f007f0;
        and.b32 a1, a1, 0x07f007f0;
        lop3.b32 a0, t0, 0x80008000, a0, 0xEA;
        lop3.b32 a1, t1, 0x80008000, a1, 0xEA;
        mul.rn.bf16x2 m0, a0, $7;
        mul.rn.bf16x2 m1, a1, $7;
        fma.rn.bf16x2 $0, a0, $3, m0;
        fma.rn.bf16x2 $1, a1, $3, m1;
        }
        """,
        "=r,=r,r,r,r,r,r,r,r,r,r",
        [bits, high, low],
        dtype=tl.bfloat16,
        is_pure=True,
        pack=4,
    )


@triton.jit
def load_rows(
    latent, rope, scales, block_table, sequence, index, T: tl.constexpr, PAGE: tl.constexpr,
    TABLE_STRIDE: tl.constexpr, LATENT_STRIDE: tl.constexpr, ROPE_STRIDE: tl.constexpr, SCALE_STRIDE: tl.constexpr,
):  # fmt: skip
    """The rows of some picks as they are stored: [., 4, 128] bytes with [., 4] scales, or [., 512] latents (whose
    scales mean nothing), [., 64] rope parts, and which rows exist; zeros where none does, whatever the cache holds."""
    page, slot, exists = row_offsets(block_table, sequence, index, T, TABLE_STRIDE, PAGE)
    quarter = tl.arange(0, 4)
    inner = tl.arange(0, 128)
    row = latent + page * LATENT_STRIDE[0] + slot * LATENT_STRIDE[1]
    if scales is not None:
        place = row[:, None, None] + (quarter * 128)[None, :, None] + inner[None, None, :]
        stored = tl.load(place, mask=exists[:, None, None], other=0)
        scale_row = scales + page * SCALE_STRIDE[0] + slot * SCALE_STRIDE[1]
        scale = tl.load(scale_row[:, None] + quarter[None, :], mask=exists[:, None], other=0.0)
    else:
        stored = tl.load(row[:, None] + tl.arange(0, 512)[None, :], mask=exists[:, None], other=0.0)
        scale = exists
    key_row = rope + page * ROPE_STRIDE[0] + slot * ROPE_STRIDE[1]
    keys = tl.load(key_row[:, None] + tl.arange(0, 64)[None, :], mask=exists[:, None], other=0.0)
    return stored, scale, keys, exists


@triton.jit
def latent_values(stored, scale, INTERPRET: tl.constexpr):
    """[., 512] latents of ``load_rows`` as bf16 (fp32 under the interpreter)."""
    if stored.dtype == tl.uint8:
        shape: tl.constexpr = stored.shape
        if INTERPRET:
            stored = e4m3_value(stored) * scale[:, :, None]
        else:
            high, low = two_halves(scale * 1329227995784915872903807060280344576.0)
            high = tl.broadcast_to(high[:, :, None], shape)
            stored = scaled_e4m3(stored, high, tl.broadcast_to(low[:, :, None], shape))
        stored = tl.reshape(stored, (shape[0], 512))
    elif INTERPRET:
        stored = stored.to(tl.float32)
    return stored


@triton.jit
def load_queries(
    q_latent, q_rope, sequence, token, first_head,
    H: tl.constexpr, Q_STRIDE: tl.constexpr, Q_ROPE_STRIDE: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Both parts of 64 heads' queries; zeros past the last head."""
    head = first_head + tl.arange(0, 64)
    heads = (head < H)[:, None]
    q_row = q_latent + sequence * Q_STRIDE[0] + token * Q_STRIDE[1]
    query = tl.load(q_row + head[:, None] * Q_STRIDE[2] + tl.arange(0, 512)[None, :], mask=heads, other=0.0)
    turn_row = q_rope + sequence * Q_ROPE_STRIDE[0] + token * Q_ROPE_STRIDE[1]
    turned = tl.load(turn_row + head[:, None] * Q_ROPE_STRIDE[2] + tl.arange(0, 64)[None, :], mask=heads, other=0.0)
    if INTERPRET:
        query = query.to(tl.float32)
        turned = turned.to(tl.float32)
    return query, turned


@triton.jit
def attend_rows(
    query, turned, stored, scale, keys, exists, peak, total, mixed, SCALE: tl.constexpr, INTERPRET: tl.constexpr
):
    """One step of the online softmax over loaded rows."""
    values = latent_values(stored, scale, INTERPRET)
    if INTERPRET:
        keys = keys.to(tl.float32)
    logit = tl.dot(turned, tl.trans(keys), input_precision="ieee")
    logit = tl.dot(query, tl.trans(values), logit, input_precision="ieee")
    logit = tl.where(exists[None, :], logit * (SCALE * 1.4426950408889634), float("-inf"))
    new_peak = tl.maximum(peak, tl.max(logit, 1))
    shrink = tl.exp2(peak - new_peak)
    weight = tl.exp2(logit - new_peak[:, None])
    total = total * shrink + tl.sum(weight, 1)
    mixed = tl.dot(weight.to(values.dtype), values, mixed * shrink[:, None], input_precision="ieee")
    return new_peak, total, mixed


@triton.jit
def attend_and_join(
    q_latent, q_rope, latent, rope, scales, indices, block_table, parts, part_lse, state, out, out_lse,
    S: tl.constexpr, H: tl.constexpr, T: tl.constexpr, K: tl.constexpr, PAGE: tl.constexpr, SCALE: tl.constexpr,
    Q_STRIDE: tl.constexpr, Q_ROPE_STRIDE: tl.constexpr, LATENT_STRIDE: tl.constexpr, ROPE_STRIDE: tl.constexpr,
    SCALE_STRIDE: tl.constexpr, INDEX_STRIDE: tl.constexpr, TABLE_STRIDE: tl.constexpr,
    SPLITS: tl.constexpr, SPLIT: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
    STAGE: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """One part of the list of one query row for 64 heads, then 64 / SPLITS heads of the whole list."""
    ALL: tl.constexpr = STAGE < 0
    GROUPS: tl.constexpr = (H + 63) // 64
    part = tl.program_id(0) % SPLITS
    group = (tl.program_id(0) // SPLITS).to(tl.int64)
    row = group // GROUPS
    first_head = (group % GROUPS).to(tl.int32) * 64
    column = tl.arange(0, 512)
    if ALL or STAGE == 0:
        sequence = row // S
        token = row % S
        index_row = indices + sequence * INDEX_STRIDE[0] + token * INDEX_STRIDE[1]
        pick = part * SPLIT + tl.arange(0, BLOCK_K)
        peak = tl.full([64], -1e30, tl.float32)
        total = tl.zeros([64], tl.float32)
        mixed = tl.zeros([64, 512], tl.float32)
        if SPLIT == BLOCK_K:
            # The picks first: the latency of the queries covers theirs.
            index = tl.load(index_row + pick * INDEX_STRIDE[2], mask=pick < K, other=-1)
            query, turned = load_queries(
                q_latent, q_rope, sequence, token, first_head, H, Q_STRIDE, Q_ROPE_STRIDE, INTERPRET
            )
            stored, scale, keys, exists = load_rows(
                latent, rope, scales, block_table, sequence, index, T, PAGE, TABLE_STRIDE, LATENT_STRIDE, ROPE_STRIDE,
                SCALE_STRIDE,
            )  # fmt: skip
            peak, total, mixed = attend_rows(
                query, turned, stored, scale, keys, exists, peak, total, mixed, SCALE, INTERPRET
            )
        else:
            query, turned = load_queries(
                q_latent, q_rope, sequence, token, first_head, H, Q_STRIDE, Q_ROPE_STRIDE, INTERPRET
            )
            for start in tl.range(0, SPLIT, BLOCK_K, num_stages=STAGES):
                if K == SPLITS * SPLIT:
                    index = tl.load(index_row + (start + pick) * INDEX_STRIDE[2])
                else:
                    index = tl.load(index_row + (start + pick) * INDEX_STRIDE[2], mask=start + pick < K, other=-1)
                stored, scale, keys, exists = load_rows(
                    latent, rope, scales, block_table, sequence, index, T, PAGE, TABLE_STRIDE, LATENT_STRIDE,
                    ROPE_STRIDE, SCALE_STRIDE,
                )  # fmt: skip
                peak, total, mixed = attend_rows(
                    query, turned, stored, scale, keys, exists, peak, total, mixed, SCALE, INTERPRET
                )
        seen = total > 0.0
        mixed *= tl.where(seen, 1.0 / total, 0.0)[:, None]
        lse = tl.where(seen, peak + tl.log2(total), float("-inf"))
        if SPLITS == 1:
            head = first_head + tl.arange(0, 64)
            place = out + (row * H + head)[:, None] * 512 + column[None, :]
            tl.store(place, narrow(mixed, out, INTERPRET), mask=(head < H)[:, None])
            tl.store(out_lse + row * H + head, lse * 0.6931471805599453, mask=head < H)
        else:
            own = (group * SPLITS + part) * 64 + tl.arange(0, 64)
            tl.store(parts + own[:, None] * 512 + column[None, :], mixed)
            tl.store(part_lse + own, lse)
    if SPLITS > 1:
        if ALL:
            meet(state + group * 32, SPLITS)
        if ALL or STAGE == 1:
            join_parts(parts, part_lse, out, out_lse, group, row, first_head, part, H, SPLITS, INTERPRET)


@triton.jit
def join_parts(
    parts, part_lse, out, out_lse, group, row, first_head, part,
    H: tl.constexpr, SPLITS: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Weigh all parts of some heads in one tile, so that one latency covers them; other programs wrote them."""
    EACH: tl.constexpr = 64 // SPLITS
    column = tl.arange(0, 512)
    within = part * EACH + tl.arange(0, EACH)
    source = (group * SPLITS + tl.arange(0, SPLITS)[:, None]) * 64 + within[None, :]
    lse = tl.load(part_lse + source, cache_modifier=".cg")
    values = tl.load(parts + source[:, :, None] * 512 + column[None, None, :], cache_modifier=".cg")
    # A part that saw nothing has -inf, and so may all have.
    peak = tl.maximum(tl.max(lse, 0), -1e30)
    weight = tl.exp2(lse - peak[None, :])
    total = tl.sum(weight, 0)
    result = tl.sum(values * weight[:, :, None], 0)
    result *= tl.where(total > 0.0, 1.0 / total, 0.0)[:, None]
    head = first_head + within
    place = out + (row * H + head)[:, None] * 512 + column[None, :]
    tl.store(place, narrow(result, out, INTERPRET), mask=(head < H)[:, None])
    natural = tl.where(total > 0.0, peak + tl.log2(total), float("-inf")) * 0.6931471805599453
    tl.store(out_lse + row * H + head, natural, mask=head < H)


@cache
def states(device):
    """The counters of ``meeting.row_state``."""
    del device
    return {}


def launch(q_latent, q_rope, latent, rope, indices, block_table=None):
    """The operator's tensors in schema order -> (out [B, S, H, 512], lse fp32 [B, S, H])."""
    latent, rope, scales = cache_parts(latent, rope, CONSTANTS["columns"])
    fp32 = {"dtype": torch.float32, "device": q_latent.device}
    out = torch.empty(CONSTANTS["out"], dtype=q_latent.dtype, device=q_latent.device)
    lse, parts, part_lse = (torch.empty(CONSTANTS[name], **fp32) for name in ("lse", "parts", "part_lse"))
    constants, grid = CONSTANTS["attend_and_join"], CONSTANTS["grid"]
    state = None
    if constants["SPLITS"] > 1 and not INTERPRET:
        state = row_state(states(q_latent.device), CONSTANTS["state"], q_latent.device)
    operands = (q_latent, q_rope, latent, rope, scales, indices, block_table, parts, part_lse, state, out, lse)
    if INTERPRET:
        for stage in range(2):
            attend_and_join[grid](*operands, **{**constants, "STAGE": stage, "INTERPRET": True})
        return out, lse
    attend_and_join[grid](*operands, **constants, **CONSTANTS["options"])
    return out, lse
