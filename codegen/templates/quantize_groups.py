# pyright: basic, reportGeneralTypeIssues=false
# Kernel text: inside @triton.jit, names are tensors of a language that type checkers do not know.
"""E4M3 under a scale for each group of a row: a power of two in a byte (MXFP8) or fp32; many groups a program."""

from typing import Any

import torch
import triton
import triton.language as tl
from triton import knobs

from kimigraph.codegen.templates.cache_bytes import (
    e4m3_bits,
    e8m0_scale,
    hadamard_turned,
    largest_bits,
    over_scale,
    tile_scale,
)
from kimigraph.codegen.templates.fp8_bytes import e8m0_value

INTERPRET = knobs.runtime.interpret
CONSTANTS: dict[str, Any] = {}


@triton.jit
def row_start(row, SIZE: tl.constexpr, STRIDE: tl.constexpr):
    """Where a row of x begins; x has the leading sizes SIZE, the last of them counts fastest."""
    last = row % SIZE[2]
    middle = row // SIZE[2] % SIZE[1]
    first = row // (SIZE[1] * SIZE[2])
    return first.to(tl.int64) * STRIDE[0] + middle.to(tl.int64) * STRIDE[1] + last.to(tl.int64) * STRIDE[2]


@triton.jit
def quantize_groups(
    x, values, scales,
    LINES: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, SIZE: tl.constexpr,
    STRIDE: tl.constexpr, FLAT: tl.constexpr, MX: tl.constexpr, CEIL: tl.constexpr, POWER2: tl.constexpr,
    ROTATE: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_E: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """BLOCK_R of the LINES groups. FLAT: they lie one behind the other. ROTATE: they are the groups of one row."""
    first = tl.program_id(0).to(tl.int64) * (GROUPS if ROTATE else BLOCK_R)
    line = first + tl.arange(0, BLOCK_R)
    element = tl.arange(0, BLOCK_E)
    live = (line < LINES)[:, None] & (element < GROUP)[None, :]
    if ROTATE:
        # BLOCK_R groups of BLOCK_E elements are the whole row.
        column = tl.arange(0, D)
        row = tl.load(x + row_start(tl.program_id(0), SIZE, STRIDE) + column * STRIDE[3]).to(tl.float32)
        value = tl.reshape(hadamard_turned(row, D), [BLOCK_R, BLOCK_E])
        place = first * GROUP + tl.arange(0, BLOCK_R)[:, None] * GROUP + element[None, :]
    elif FLAT:
        place = line[:, None] * GROUP + element[None, :]
        value = tl.load(x + place, mask=live, other=0.0).to(tl.float32)
    else:
        column = (line % GROUPS)[:, None] * GROUP + element[None, :]
        live = live & (column < D)
        row = line // GROUPS
        source = row_start(row, SIZE, STRIDE)[:, None] + column * STRIDE[3]
        place = row[:, None] * D + column
        value = tl.load(x + source, mask=live, other=0.0).to(tl.float32)
    if MX:
        power = e8m0_scale(value, 1, CEIL)
        scaled = value * e8m0_value(tl.where(power == 255, 255, 254 - power))[:, None]
        tl.store(scales + line, power.to(tl.uint8), mask=line < LINES)
    else:
        factor = tile_scale(largest_bits(value, 1), POWER2, INTERPRET)
        scaled = over_scale(value, factor[:, None], POWER2, INTERPRET)
        tl.store(scales + line, factor, mask=line < LINES)
    tl.store(values + place, e4m3_bits(scaled, INTERPRET), mask=live)


def launch(x, *, memory=torch):
    """The operator's tensor -> values and scales."""
    values = memory.empty(CONSTANTS["values"], dtype=torch.uint8, device=x.device)
    kind = torch.uint8 if CONSTANTS["quantize_groups"]["MX"] else torch.float32
    scales = memory.empty(CONSTANTS["scales"], dtype=kind, device=x.device)
    if CONSTANTS["grid"][0]:
        quantize_groups[CONSTANTS["grid"]](
            x, values, scales, **{**CONSTANTS["quantize_groups"], "INTERPRET": INTERPRET}, **CONSTANTS["options"]
        )
    return (values if CONSTANTS["quantize_groups"]["MX"] else values.view(torch.float8_e4m3fn)), scales
