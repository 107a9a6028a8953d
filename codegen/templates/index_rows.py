# pyright: basic, reportArgumentType=false
# Kernel text: inside @triton.jit, names are tensors of a language that type checkers do not know.
"""Scores of rows of index keys for one query. Keys are contiguous or paged; floats, or e4m3, in groups or not."""

import triton
import triton.language as tl

from kimigraph.codegen.templates.cache_bytes import e4m3_nearest, e8m0_scale
from kimigraph.codegen.templates.fp8_bytes import e4m3_value, e8m0_value


@triton.jit
def key_offsets(
    block_table, sequence, position, inside, KEY_STRIDE: tl.constexpr, TABLE_STRIDE: tl.constexpr, PAGE: tl.constexpr
):
    """Element offsets of key rows, int64 from the page id on, and which rows exist (an unmapped page has none)."""
    if PAGE == 0:
        page = sequence
        slot = position.to(tl.int64)
    else:
        entry = block_table + sequence * TABLE_STRIDE[0] + (position // PAGE).to(tl.int64) * TABLE_STRIDE[1]
        page = tl.load(entry, mask=inside, other=-1).to(tl.int64)
        slot = (position % PAGE).to(tl.int64)
        inside = inside & (page >= 0)
    return page * KEY_STRIDE[0] + slot * KEY_STRIDE[1], inside


@triton.jit
def key_planes(keys, offset, exists, D: tl.constexpr, PLANE: tl.constexpr, GROUP: tl.constexpr):
    """Rows of the keys at ``offset``, rows of the scales of their groups (if any), and the keys' own scales (or 1)."""
    row = keys + offset[:, None]
    group_row = row
    scale = tl.full(offset.shape, 1.0, tl.float32)
    if GROUP > 0:
        # Planes of PLANE keys and of the scales of their groups, in one page.
        GROUPS: tl.constexpr = (D + GROUP - 1) // GROUP
        page, slot = offset // (PLANE * (D + GROUPS)), offset % (PLANE * (D + GROUPS)) // (D + GROUPS)
        row = keys + (page * (PLANE * (D + GROUPS)) + slot * D)[:, None]
        group_row = keys + (page * (PLANE * (D + GROUPS)) + PLANE * D + slot * GROUPS)[:, None]
    elif PLANE > 0:
        # Planes of PLANE keys and of their scales, in one page.
        page, slot = offset // (PLANE * (D + 4)), offset % (PLANE * (D + 4)) // (D + 4)
        row = keys + (page * (PLANE * (D + 4)) + slot * D)[:, None]
        scale_row = keys.to(tl.pointer_type(tl.float32)) + page * (PLANE * (D // 4 + 1)) + PLANE * (D // 4) + slot
        scale = tl.load(scale_row, mask=exists, other=0.0)
    return row, group_row, scale


@triton.jit
def load_channels(
    row,
    inside,
    channel: tl.constexpr,
    axis: tl.constexpr,
    D: tl.constexpr,
    STRIDE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    UPCAST: tl.constexpr,
    DECODED: tl.constexpr,
):
    """BLOCK_D channels of each row, along ``axis``; zeros outside.

    Bytes are e4m3; DECODED "fp16" or "bf16", both of which hold them all, has them converted by an instruction.
    """
    column = tl.expand_dims(channel + tl.arange(0, BLOCK_D), 1 - axis)
    tile = tl.load(row + column * STRIDE, mask=inside & (column < D), other=0)
    if tile.dtype == tl.uint8:
        if DECODED == "bits":
            tile = e4m3_value(tile).to(tl.float32 if UPCAST else tl.bfloat16)
        else:
            tile = tile.to(tl.float8e4nv, bitcast=True).to(tl.float16)
            if DECODED == "bf16":
                tile = tile.to(tl.bfloat16)
    elif UPCAST:
        tile = tile.to(tl.float32)
    return tile


@triton.jit
def load_groups(
    row,
    scale_row,
    inside,
    channel: tl.constexpr,
    axis: tl.constexpr,
    D: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_D: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """As ``load_channels`` for e4m3 in groups: times their powers of two, which bf16 holds as exactly as fp32."""
    kind = tl.float32 if UPCAST else tl.bfloat16
    if axis == 1 and BLOCK_D % GROUP == 0 and (GROUP & (GROUP - 1)) == 0:
        # A scale is loaded once for its group: [rows, groups, elements], flattened afterwards.
        group = channel // GROUP + tl.arange(0, BLOCK_D // GROUP)[None, :, None]
        column = group * GROUP + tl.arange(0, GROUP)[None, None, :]
        there = tl.expand_dims(inside, 2)
        bits = tl.load(tl.expand_dims(row, 2) + column, mask=there & (column < D), other=0)
        power = tl.load(tl.expand_dims(scale_row, 2) + group, mask=there & (group * GROUP < D), other=127)
        tile = (e4m3_value(bits) * e8m0_value(power)).to(kind)
        tile = tl.reshape(tile, [row.shape[0], BLOCK_D])
    else:
        column = tl.expand_dims(channel + tl.arange(0, BLOCK_D), 1 - axis)
        bits = tl.load(row + column, mask=inside & (column < D), other=0)
        power = tl.load(scale_row + column // GROUP, mask=inside & (column < D), other=127)
        tile = (e4m3_value(bits) * e8m0_value(power)).to(kind)
    return tile


@triton.jit
def rounded_groups(tile, GROUP: tl.constexpr):
    """[channels, heads] -> what e4m3 under a power of two for each GROUP channels leaves of it."""
    SIDE: tl.constexpr = min(GROUP, tile.shape[0])
    groups = tl.reshape(tile.to(tl.float32), [tile.shape[0] // SIDE, SIDE, tile.shape[1]])
    power = e8m0_scale(groups, 1, True)
    inverse = e8m0_value(tl.where(power == 255, 255, 254 - power))
    values = e4m3_nearest(groups * inverse[:, None, :]) * e8m0_value(power)[:, None, :]
    return tl.reshape(values, tile.shape).to(tile.dtype)


@triton.jit
def key_tile(
    row, group_row, exists, channel: tl.constexpr, D: tl.constexpr, STRIDE: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_D: tl.constexpr, UPCAST: tl.constexpr, DECODED: tl.constexpr,
):  # fmt: skip
    """[keys, BLOCK_D]: channels of the rows of ``key_planes``."""
    if GROUP > 0:
        tile = load_groups(row, group_row, exists[:, None], channel, 1, D, GROUP, BLOCK_D, UPCAST)
    else:
        tile = load_channels(row, exists[:, None], channel, 1, D, STRIDE, BLOCK_D, UPCAST, DECODED)
    return tile


@triton.jit
def key_scores(
    q, weights, q_scales, sequence, token, kept, row, group_row, exists,
    H: tl.constexpr, D: tl.constexpr, Q_STRIDE: tl.constexpr, KEY_STRIDE: tl.constexpr, WEIGHT_STRIDE: tl.constexpr,
    Q_SCALE_STRIDE: tl.constexpr, GROUP: tl.constexpr, QUANTISES: tl.constexpr, DOT_SCALE: tl.constexpr,
    WEIGHT_SCALE: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr, UPCAST: tl.constexpr,
    DECODED: tl.constexpr,
):  # fmt: skip
    """Sums over the heads, [keys] fp32, still to be multiplied by the keys' own scales.

    ``kept`` is the ``key_tile`` of channel 0, for callers that score the same keys again and again, or None: it serves
    where it has all channels. Products or weights are scaled first; no scale is 1.
    """
    score = tl.zeros(exists.shape, tl.float32)
    for head_block in tl.static_range(0, H, BLOCK_H):
        head = head_block + tl.arange(0, BLOCK_H)
        q_row = q + sequence * Q_STRIDE[0] + token * Q_STRIDE[1] + head[None, :] * Q_STRIDE[2]
        weight_row = weights + sequence * WEIGHT_STRIDE[0] + token * WEIGHT_STRIDE[1]
        weight = tl.load(weight_row + head * WEIGHT_STRIDE[2], mask=head < H, other=0.0).to(tl.float32) * WEIGHT_SCALE
        dots = tl.zeros([exists.shape[0], BLOCK_H], tl.float32)
        for channel in tl.static_range(0, D, BLOCK_D):
            if q_scales is not None:
                powers = q_scales + sequence * Q_SCALE_STRIDE[0] + token * Q_SCALE_STRIDE[1]
                powers += head[None, :] * Q_SCALE_STRIDE[2]
                query = load_groups(q_row, powers, (head < H)[None, :], channel, 0, D, GROUP, BLOCK_D, UPCAST)
            else:
                query = load_channels(q_row, (head < H)[None, :], channel, 0, D, Q_STRIDE[3], BLOCK_D, UPCAST, DECODED)
                if QUANTISES:
                    query = rounded_groups(query, GROUP)
            if kept is None or D > BLOCK_D:
                tile = key_tile(row, group_row, exists, channel, D, KEY_STRIDE[2], GROUP, BLOCK_D, UPCAST, DECODED)
            else:
                tile = kept
            dots = tl.dot(tile, query, dots, input_precision="ieee")
        dots *= DOT_SCALE
        # Not a maximum: a NaN must reach the sum.
        weighted = tl.where(dots < 0.0, 0.0, dots) * weight[None, :]
        if H % BLOCK_H != 0:
            # A key with an infinity makes NaN in the padding heads.
            weighted = tl.where((head < H)[None, :], weighted, 0.0)
        score += tl.sum(weighted, 1)
    return score
