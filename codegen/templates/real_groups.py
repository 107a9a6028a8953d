# pyright: basic
# Kernel text: inside @triton.jit, names are tensors of a language that type checkers do not know.
"""MXFP8 in groups of 32 as the bf16 that it stands for, exactly: index keys in the order of positions, and queries."""

import triton
import triton.language as tl

from kimigraph.codegen.templates.cache_bytes import e4m3_nearest, e8m0_scale
from kimigraph.codegen.templates.fp8_bytes import e4m3_value, e8m0_value


@triton.jit
def store_real(values, powers, real, row, ROWS: tl.constexpr, VALUE_STRIDE: tl.constexpr, POWER_STRIDE: tl.constexpr):
    """ROWS rows of 128 e4m3 with four powers of two each -> rows of bf16 from ``row`` on."""
    line = tl.arange(0, ROWS)[:, None, None]
    group = tl.arange(0, 4)[None, :, None]
    column = group * 32 + tl.arange(0, 32)[None, None, :]
    power = e8m0_value(tl.load(powers + line * POWER_STRIDE + group))
    value = e4m3_value(tl.load(values + line * VALUE_STRIDE + column)) * power
    tl.store(real + (row + line) * 128 + column, value.to(tl.bfloat16))


@triton.jit
def real_keys(
    keys, block_table, real, tiles, sequence, TABLE_STRIDE: tl.constexpr, PLANE: tl.constexpr, PAGED: tl.constexpr
):
    """64 keys of a sequence; ``tiles`` [T / 64] says where each 64 stand now, below 0 where no page holds them."""
    tile = tl.program_id(0)
    if PAGED:
        plane = tl.load(block_table + tile.to(tl.int64) * TABLE_STRIDE).to(tl.int64)
        slot = 0
    else:
        plane = tl.full([], 0, tl.int64) + sequence
        slot = tile * 64
    tl.store(tiles + tile, tl.where(plane < 0, -1, tile))
    page = keys + tl.maximum(plane, 0) * (PLANE * 132)
    values = page + slot * 128
    store_real(values, page + PLANE * 128 + slot * 4, real, tile.to(tl.int64) * 64, 64, 128, 4)


@triton.jit
def real_queries(q, q_scales, real, H: tl.constexpr, Q_STRIDE: tl.constexpr, Q_SCALE_STRIDE: tl.constexpr):
    """The heads of one query row; without ``q_scales`` they are bf16, and what MXFP8 leaves of them is stored."""
    token = tl.program_id(0).to(tl.int64)
    values = q + token * Q_STRIDE[0]
    if q_scales is not None:
        powers = q_scales + token * Q_SCALE_STRIDE[0]
        store_real(values, powers, real, token * H, H, Q_STRIDE[1], Q_SCALE_STRIDE[1])
    else:
        head = tl.arange(0, H)[:, None, None]
        column = tl.arange(0, 4)[None, :, None] * 32 + tl.arange(0, 32)[None, None, :]
        value = tl.load(values + head * Q_STRIDE[1] + column).to(tl.float32)
        power = e8m0_scale(value, 2, True)
        inverse = e8m0_value(tl.where(power == 255, 255, 254 - power))
        left = e4m3_nearest(value * tl.expand_dims(inverse, 2)) * tl.expand_dims(e8m0_value(power), 2)
        tl.store(real + (token * H + head) * 128 + column, left.to(tl.bfloat16))
