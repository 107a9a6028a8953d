# pyright: basic, reportGeneralTypeIssues=false
# Kernel text: inside @triton.jit, names are tensors of a language that type checkers do not know.
"""New latent rows on their way into the cache: RMS norm, rotation of the rope part, fp8 tiles; a program a row."""

from typing import Any

import triton
import triton.language as tl
from triton import knobs

from kimigraph.codegen.templates.cache_bytes import (
    e4m3_bits,
    largest_magnitude,
    over_scale,
    partner_column,
    source_column,
    tile_scale,
    turned,
)
from kimigraph.codegen.templates.cache_rows import cache_parts, row_offsets
from kimigraph.codegen.templates.rounding import narrow

INTERPRET = knobs.runtime.interpret
CONSTANTS: dict[str, Any] = {}


@triton.jit
def write_row(
    latent, rope, scales, values, rope_values, positions, cos, sin, block_table, norm_weight,
    S: tl.constexpr, R: tl.constexpr, T: tl.constexpr, PAGE: tl.constexpr, STYLE: tl.constexpr,
    LATENT_STRIDE: tl.constexpr, ROPE_STRIDE: tl.constexpr, SCALE_STRIDE: tl.constexpr, VALUE_STRIDE: tl.constexpr,
    ROPE_VALUE_STRIDE: tl.constexpr, POSITION_STRIDE: tl.constexpr, COS_STRIDE: tl.constexpr,
    SIN_STRIDE: tl.constexpr, TABLE_STRIDE: tl.constexpr, TILES: tl.constexpr, TILE: tl.constexpr,
    NORM_EPS: tl.constexpr, POWER2: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr,
    INTERPRET: tl.constexpr,
):  # fmt: skip
    """One row of TILES times TILE latent columns. What ``index_key_write`` skips is skipped."""
    program = tl.program_id(0)
    sequence = (program // S).to(tl.int64)
    token = (program % S).to(tl.int64)
    position = tl.load(positions + sequence * POSITION_STRIDE[0] + token * POSITION_STRIDE[1]).to(tl.int64)
    page, slot, exists = row_offsets(block_table, sequence, position, T, TABLE_STRIDE, PAGE)
    tile = tl.arange(0, BLOCK_N)
    offset = tl.arange(0, BLOCK_T)
    column = tile[:, None] * TILE + offset[None, :]
    inside = (tile < TILES)[:, None] & (offset < TILE)[None, :]
    row = values + sequence * VALUE_STRIDE[0] + token * VALUE_STRIDE[1]
    value = tl.load(row + column * VALUE_STRIDE[2], mask=inside, other=0.0).to(tl.float32)
    if norm_weight is not None:
        # An fp64 sum: no order of adding shows in the fp32 result.
        wide = value.to(tl.float64)
        mean = tl.sum(tl.sum(wide * wide, 1), 0) / (TILES * TILE)
        scale = (1.0 / tl.sqrt(mean + NORM_EPS)).to(tl.float32)
        value = value * scale * tl.load(norm_weight + column, mask=inside, other=0.0).to(tl.float32)
    place = latent + page * LATENT_STRIDE[0] + slot * LATENT_STRIDE[1] + column * LATENT_STRIDE[2]
    if scales is not None:
        factor = tile_scale(largest_magnitude(value, 1), POWER2, INTERPRET)
        scaled = over_scale(value, factor[:, None], POWER2, INTERPRET)
        tl.store(place, e4m3_bits(scaled, INTERPRET), mask=inside & exists)
        scale_row = scales + page * SCALE_STRIDE[0] + slot * SCALE_STRIDE[1]
        tl.store(scale_row + tile * SCALE_STRIDE[2], factor, mask=(tile < TILES) & exists)
    else:
        tl.store(place, narrow(value, latent, INTERPRET), mask=inside & exists)
    if rope is not None:
        turn = tl.arange(0, BLOCK_R)
        turns = turn < R
        rope_row = rope_values + sequence * ROPE_VALUE_STRIDE[0] + token * ROPE_VALUE_STRIDE[1]
        source = source_column(turn, R // 2, STYLE)
        new = tl.load(rope_row + source * ROPE_VALUE_STRIDE[2], mask=turns, other=0.0).to(tl.float32)
        if STYLE != 0:
            other = partner_column(turn, R // 2, STYLE)
            partner = tl.load(rope_row + other * ROPE_VALUE_STRIDE[2], mask=turns, other=0.0).to(tl.float32)
            cos_row = cos + sequence * COS_STRIDE[0] + token * COS_STRIDE[1]
            sin_row = sin + sequence * SIN_STRIDE[0] + token * SIN_STRIDE[1]
            new = turned(new, partner, cos_row, sin_row, turn, turns, R // 2, STYLE, COS_STRIDE[2], SIN_STRIDE[2])
        place = rope + page * ROPE_STRIDE[0] + slot * ROPE_STRIDE[1] + turn * ROPE_STRIDE[2]
        tl.store(place, narrow(new, rope, INTERPRET), mask=turns & exists)


def launch(latent, rope, values, rope_values, positions, cos=None, sin=None, block_table=None, norm_weight=None):
    """The operator's tensors in schema order; nothing is returned."""
    latent, rope, scales = cache_parts(latent, rope, CONSTANTS["columns"])
    if rope_values is None or rope_values.shape[-1] == 0:
        rope = rope_values = None
    write_row[CONSTANTS["grid"]](
        latent, rope, scales, values, rope_values, positions, cos, sin, block_table, norm_weight,
        **{**CONSTANTS["write_row"], "INTERPRET": INTERPRET}, **CONSTANTS["options"],
    )  # fmt: skip
