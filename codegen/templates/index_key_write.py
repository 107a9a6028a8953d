# pyright: basic, reportGeneralTypeIssues=false
# Kernel text: inside @triton.jit, names are tensors of a language that type checkers do not know.
"""New index keys on their way into the cache: layer norm, rotation, fp8; a program a key."""

from typing import Any

import triton
import triton.language as tl
from triton import knobs

from kimigraph.codegen.templates.cache_bytes import (
    e4m3_bits,
    e8m0_scale,
    hadamard_turned,
    largest_magnitude,
    over_scale,
    partner_column,
    source_column,
    tile_scale,
    turned,
)
from kimigraph.codegen.templates.cache_rows import row_offsets
from kimigraph.codegen.templates.fp8_bytes import e8m0_value
from kimigraph.codegen.templates.rounding import narrow

INTERPRET = knobs.runtime.interpret
CONSTANTS: dict[str, Any] = {}


@triton.jit
def normalised(value, mean, scale, norm_weight, norm_bias, column, inside):
    """Layer norm by known statistics, in fp32."""
    if norm_weight is not None:
        value = (value - mean) * scale
        value = value * tl.load(norm_weight + column, mask=inside, other=0.0).to(tl.float32)
        if norm_bias is not None:
            value = value + tl.load(norm_bias + column, mask=inside, other=0.0).to(tl.float32)
    return value


@triton.jit
def write_key(
    keys, values, positions, norm_weight, norm_bias, cos, sin, block_table,
    S: tl.constexpr, D: tl.constexpr, T: tl.constexpr, PAGE: tl.constexpr, HALF: tl.constexpr, STYLE: tl.constexpr,
    NORM_EPS: tl.constexpr, KEY_STRIDE: tl.constexpr, VALUE_STRIDE: tl.constexpr, POSITION_STRIDE: tl.constexpr,
    COS_STRIDE: tl.constexpr, SIN_STRIDE: tl.constexpr, TABLE_STRIDE: tl.constexpr, PLANE: tl.constexpr,
    POWER2: tl.constexpr, GROUP: tl.constexpr, ROTATE: tl.constexpr, BLOCK_D: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """One key. A position below 0, beyond the cache or on an unmapped page writes nothing."""
    program = tl.program_id(0)
    sequence = (program // S).to(tl.int64)
    token = (program % S).to(tl.int64)
    column = tl.arange(0, BLOCK_D)
    inside = column < D
    position = tl.load(positions + sequence * POSITION_STRIDE[0] + token * POSITION_STRIDE[1]).to(tl.int64)
    page, slot, exists = row_offsets(block_table, sequence, position, T, TABLE_STRIDE, PAGE)
    row = values + sequence * VALUE_STRIDE[0] + token * VALUE_STRIDE[1]
    source = source_column(column, HALF, STYLE)
    value = tl.load(row + source * VALUE_STRIDE[2], mask=inside, other=0.0).to(tl.float32)
    mean = tl.full([], 0.0, tl.float32)
    scale = tl.full([], 1.0, tl.float32)
    if norm_weight is not None:
        # fp64 sums: no order of adding shows in the fp32 result.
        wide = value.to(tl.float64)
        middle = tl.sum(wide, 0) / D
        spread = tl.sum(tl.where(inside, (wide - middle) * (wide - middle), 0.0), 0) / D
        mean = middle.to(tl.float32)
        scale = (1.0 / tl.sqrt(spread + NORM_EPS)).to(tl.float32)
    prepared = normalised(value, mean, scale, norm_weight, norm_bias, source, inside)
    if STYLE != 0:
        other = partner_column(column, HALF, STYLE)
        there = other < D
        partner = tl.load(row + other * VALUE_STRIDE[2], mask=there, other=0.0).to(tl.float32)
        partner = normalised(partner, mean, scale, norm_weight, norm_bias, other, there)
        cos_row = cos + sequence * COS_STRIDE[0] + token * COS_STRIDE[1]
        sin_row = sin + sequence * SIN_STRIDE[0] + token * SIN_STRIDE[1]
        prepared = turned(
            prepared, partner, cos_row, sin_row, column, inside, HALF, STYLE, COS_STRIDE[2], SIN_STRIDE[2]
        )
    if PLANE > 0:
        prepared = tl.where(inside, prepared, 0.0)
        if ROTATE:
            prepared = hadamard_turned(prepared, D)
    if GROUP > 0:
        GROUPS: tl.constexpr = (D + GROUP - 1) // GROUP
        LINES: tl.constexpr = BLOCK_D // GROUP
        group = tl.arange(0, LINES)
        grouped = tl.reshape(prepared, [LINES, GROUP])
        power = e8m0_scale(grouped, 1, True)
        inverse = e8m0_value(tl.where(power == 255, 255, 254 - power))
        code = e4m3_bits(grouped * inverse[:, None], INTERPRET)
        within = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        plane = keys + page * (PLANE * (D + GROUPS))
        tl.store(plane + slot * D + within, code, mask=(within < D) & exists)
        scales = plane + PLANE * D + slot * GROUPS
        tl.store(scales + group, power.to(tl.uint8), mask=(group < GROUPS) & exists)
    elif PLANE > 0:
        factor = tile_scale(largest_magnitude(prepared, 0), POWER2, INTERPRET)
        scaled = over_scale(prepared, factor, POWER2, INTERPRET)
        plane = keys + page * (PLANE * (D + 4))
        tl.store(plane + slot * D + column, e4m3_bits(scaled, INTERPRET), mask=inside & exists)
        scales = (plane + PLANE * D).to(tl.pointer_type(tl.float32))
        tl.store(scales + slot, factor, mask=exists)
    else:
        place = keys + page * KEY_STRIDE[0] + slot * KEY_STRIDE[1] + column * KEY_STRIDE[2]
        tl.store(place, narrow(prepared, keys, INTERPRET), mask=inside & exists)


def launch(keys, values, positions, norm_weight=None, norm_bias=None, cos=None, sin=None, block_table=None):
    """The operator's tensors in schema order; nothing is returned."""
    write_key[CONSTANTS["grid"]](
        keys, values, positions, norm_weight, norm_bias, cos, sin, block_table,
        **{**CONSTANTS["write_key"], "INTERPRET": INTERPRET}, **CONSTANTS["options"],
    )  # fmt: skip
