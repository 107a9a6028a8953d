# pyright: basic, reportGeneralTypeIssues=false
# Kernel text: inside @triton.jit, names are tensors of a language that type checkers do not know.
"""Weights in MXFP4 as ``mxfp4_quantize`` lays them: codes of all rows of a matrix, then the scales of all rows."""

import triton
import triton.language as tl

from kimigraph.codegen.templates.fp8_bytes import e8m0_value


@triton.jit
def e2m1_value(word, PLACE: tl.constexpr):
    """The E2M1 number at a place (0 to 7) of a uint32, fp32: its bits at the places that fp32 has them."""
    if PLACE < 6:
        magnitude = word << (22 - 4 * PLACE)
    else:
        magnitude = word >> (4 * PLACE - 22)
    bits = ((word << (28 - 4 * PLACE)) & 0x80000000) | (magnitude & 0x01C00000)
    return bits.to(tl.float32, bitcast=True) * 85070591730234615865843651857942052864.0


@triton.jit
def scaled_numbers(word, factor):
    """The eight E2M1 numbers of an int32 times a power of two, which is bf16 twice in an int32: eight bf16, exactly.

    Two at a time: the bits of two numbers that are 16 apart go to their places in two bf16, which then are 2 ** 126 too
    small, subnormal ones too.
    """
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 sign, size, most, none;
        mov.b32 most, 0x7e807e80;
        mov.b32 none, 0x80008000;
        shl.b32 sign, $8, 12;
        shl.b32 size, $8, 6;
        and.b32 sign, sign, 0x80008000;
        and.b32 size, size, 0x01c001c0;
        or.b32 sign, sign, size;
        fma.rn.bf16x2 sign, sign, most, none;
        fma.rn.bf16x2 sign, sign, $9, none;
        mov.b32 {$0, $4}, sign;
        shl.b32 sign, $8, 8;
        shl.b32 size, $8, 2;
        and.b32 sign, sign, 0x80008000;
        and.b32 size, size, 0x01c001c0;
        or.b32 sign, sign, size;
        fma.rn.bf16x2 sign, sign, most, none;
        fma.rn.bf16x2 sign, sign, $9, none;
        mov.b32 {$1, $5}, sign;
        shl.b32 sign, $8, 4;
        shr.u32 size, $8, 2;
        and.b32 sign, sign, 0x80008000;
        and.b32 size, size, 0x01c001c0;
        or.b32 sign, sign, size;
        fma.rn.bf16x2 sign, sign, most, none;
        fma.rn.bf16x2 sign, sign, $9, none;
        mov.b32 {$2, $6}, sign;
        and.b32 sign, $8, 0x80008000;
        shr.u32 size, $8, 6;
        and.b32 size, size, 0x01c001c0;
        or.b32 sign, sign, size;
        fma.rn.bf16x2 sign, sign, most, none;
        fma.rn.bf16x2 sign, sign, $9, none;
        mov.b32 {$3, $7}, sign;
        }
        """,
        "=&h,=&h,=&h,=&h,=&h,=&h,=&h,=&h,r,r",
        [word, factor],
        dtype=(
            tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16
        ),
        is_pure=True,
        pack=1,
    )  # fmt: skip


@triton.jit
def matrix_rows(words, planes, plane, column, ROWS: tl.constexpr, LIMIT: tl.constexpr):
    """Pointers [TILE, 1] at rows of the matrix [ROWS, LIMIT] that begins at byte ``plane``: at their codes and at their
    scales. ``words`` are the bytes of ``planes``, four at a time."""
    codes = words + plane // 4 + column[:, None] * (LIMIT // 8)
    scales = planes + (plane + ROWS * (LIMIT // 2)) + column[:, None] * (LIMIT // 32)
    return codes, scales


@triton.jit
def packed_tile(rows, begin, inside, LIMIT: tl.constexpr, STEP: tl.constexpr, INTERPRET: tl.constexpr):
    """bf16 [TILE, STEP] of ``matrix_rows`` from column ``begin`` on, a multiple of 32."""
    codes, scales = rows
    TILE: tl.constexpr = codes.shape[0]
    place = begin // 8 + tl.arange(0, STEP // 8)
    group = begin // 32 + tl.arange(0, STEP // 32)
    if LIMIT % STEP == 0:
        word = tl.load(codes + place[None, :], mask=inside, other=0)
        scale = tl.load(scales + group[None, :], mask=inside, other=0).to(tl.int32)
    else:
        word = tl.load(codes + place[None, :], mask=inside & (place < LIMIT // 8)[None, :], other=0)
        scale = tl.load(scales + group[None, :], mask=inside & (group < LIMIT // 32)[None, :], other=0).to(tl.int32)
    if INTERPRET:
        power = tl.reshape(tl.broadcast_to(e8m0_value(scale)[:, :, None], [TILE, STEP // 32, 4]), [TILE, STEP // 8])
        bits = word.to(tl.uint32, bitcast=True)
        v0 = e2m1_value(bits, 0) * power
        v1 = e2m1_value(bits, 1) * power
        v2 = e2m1_value(bits, 2) * power
        v3 = e2m1_value(bits, 3) * power
        v4 = e2m1_value(bits, 4) * power
        v5 = e2m1_value(bits, 5) * power
        v6 = e2m1_value(bits, 6) * power
        v7 = e2m1_value(bits, 7) * power
    else:
        half = tl.where(scale == 0, 0x0040, tl.where(scale == 255, 0x7FC0, scale << 7)) * 0x00010001
        factor = tl.reshape(tl.broadcast_to(half[:, :, None], [TILE, STEP // 32, 4]), [TILE, STEP // 8])
        v0, v1, v2, v3, v4, v5, v6, v7 = scaled_numbers(word, factor)
    low = tl.join(tl.join(v0, v4), tl.join(v2, v6))
    high = tl.join(tl.join(v1, v5), tl.join(v3, v7))
    return tl.reshape(tl.join(low, high), [TILE, STEP]).to(tl.bfloat16)
