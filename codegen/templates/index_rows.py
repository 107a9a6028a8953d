# pyright: basic, reportArgumentType=false
# Kernel text: inside @triton.jit, names are tensors of a language that type checkers do not know.
"""Rows of index keys and queries as tiles of a product: contiguous or paged; floats, or e4m3, in groups or not."""

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
