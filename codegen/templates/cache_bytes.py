# pyright: basic
# Kernel text: inside @triton.jit, names are tensors of a language that type checkers do not know.
"""Values on their way into a cache: rotation, fp8 with a scale a tile. Bit by bit what the references write."""

import triton
import triton.language as tl


@triton.jit
def e4m3_bits(value, INTERPRET: tl.constexpr):
    """fp32 -> the bits of the nearest e4m3, ties to even, 448 at most; NaN stays. The interpreter's own cast errs."""
    if INTERPRET:
        value = tl.where(value != value, value, tl.minimum(tl.maximum(value, -448.0), 448.0))
        bits = value.to(tl.uint32, bitcast=True)
        exponent = tl.maximum(((bits >> 23) & 0xFF).to(tl.int32) - 127, -6)
        anchor = ((exponent + 147) << 23).to(tl.float32, bitcast=True) * 1.5
        rounded = (tl.abs(value) + anchor) - anchor
        fields = rounded.to(tl.uint32, bitcast=True)
        normal = (fields >> 20).to(tl.int32) - (120 << 3)
        small = (rounded * 512.0).to(tl.int32)
        code = tl.where(rounded < 0.015625, small, normal)
        code = tl.where(value != value, 0x7F, code | ((bits >> 24) & 0x80).to(tl.int32))
        result = code.to(tl.uint8)
    else:
        result = value.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    return result


@triton.jit
def e4m3_nearest(value):
    """fp32 -> the number that ``e4m3_bits`` stands for, by fp32 sums alone.

    For values that stay in registers: where codes are read again in the kernel that made them, ptxas 12.8 puts
    the upper half of a register that nobody wrote beside each pair of them.
    """
    value = tl.where(value != value, value, tl.minimum(tl.maximum(value, -448.0), 448.0))
    exponent = (value.to(tl.int32, bitcast=True) >> 23) & 0xFF
    # A sum with 1.5 * 2 ** 20 times the value's power of two has three bits of mantissa left for it.
    anchor = ((tl.maximum(exponent, 121) + 20) << 23).to(tl.float32, bitcast=True) * 1.5
    rounded = (tl.abs(value) + anchor) - anchor
    return tl.where(value < 0.0, -rounded, rounded)


@triton.jit
def divided(value, factor, inverse, INTERPRET: tl.constexpr):
    """value / factor rounded once; ``inverse`` is the rounded 1 / factor. 0 for an infinite factor, for a value of
    its tile.

    What the product with the inverse lacks is exact in a fused multiply-add, which the interpreter has not.
    """
    if INTERPRET:
        quotient = tl.div_rn(value, factor)
    else:
        product = value * inverse
        rest = tl.fma(product, tl.where(inverse == 0.0, 0.0, -factor), value)
        quotient = tl.fma(rest, inverse, product)
    return quotient


@triton.jit
def tile_scale(largest, POWER2: tl.constexpr, INTERPRET: tl.constexpr):
    """The fp32 scale of a tile by its largest magnitude: amax / 448, or the next power of two."""
    floored = tl.where(largest > 1e-4, largest, 1e-4)
    scale = divided(tl.where(largest != largest, largest, floored), 448.0, 1.0 / 448.0, INTERPRET)
    scale = tl.where(largest < float("inf"), scale, largest)
    if POWER2:
        bits = scale.to(tl.int32, bitcast=True)
        rounded = ((bits + 0x7FFFFF) & -0x800000).to(tl.float32, bitcast=True)
        scale = tl.where(scale < float("inf"), rounded, scale)
    return tl.where(scale != scale, float("nan"), scale)


@triton.jit
def over_scale(value, scale, POWER2: tl.constexpr, INTERPRET: tl.constexpr):
    """The values of tiles over scales from ``tile_scale``, rounded once."""
    if POWER2:
        inverse = (0x7F000000 - scale.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)
        scaled = value * tl.where(scale < float("inf"), inverse, tl.where(scale != scale, scale, 0.0))
    else:
        scaled = divided(value, scale, tl.div_rn(1.0, scale), INTERPRET)
    return scaled


@triton.jit
def largest_magnitude(value, axis: tl.constexpr):
    """The largest magnitude along an axis; NaN where there is one."""
    largest = tl.max(tl.abs(value), axis)
    spoiled = tl.max((value != value).to(tl.int32), axis)
    return tl.where(spoiled > 0, float("nan"), largest)


@triton.jit
def source_column(column, HALF: tl.constexpr, STYLE: tl.constexpr):
    """The column whose value turns into this one. STYLE 1 half split, 2 interleaved, 3 deinterleaved."""
    if STYLE == 3:
        source = tl.where(column < HALF, 2 * column, 2 * (column - HALF) + 1)
        column = tl.where(column < 2 * HALF, source, column)
    return column


@triton.jit
def partner_column(column, HALF: tl.constexpr, STYLE: tl.constexpr):
    """The column that turns together with that one; columns that do not turn are their own."""
    if STYLE == 1:
        partner = tl.where(column < HALF, column + HALF, column - HALF)
    elif STYLE == 2:
        partner = column ^ 1
    else:
        partner = tl.where(column < HALF, 2 * column + 1, 2 * (column - HALF))
    return tl.where(column < 2 * HALF, partner, column)


@triton.jit
def turned(
    value, partner, cos, sin, column, inside, HALF: tl.constexpr, STYLE: tl.constexpr,
    COS_STRIDE: tl.constexpr, SIN_STRIDE: tl.constexpr,
):  # fmt: skip
    """``value`` turned with its ``partner``; ``cos`` and ``sin`` point at the row's angles."""
    if STYLE == 2:
        angle = column // 2
        first = (column & 1) == 0
    else:
        angle = column % HALF
        first = column < HALF
    turns = inside & (column < 2 * HALF)
    c = tl.load(cos + angle * COS_STRIDE, mask=turns, other=0.0).to(tl.float32)
    s = tl.load(sin + angle * SIN_STRIDE, mask=turns, other=0.0).to(tl.float32)
    across = partner * s
    return tl.where(turns, value * c + tl.where(first, -across, across), value)


@triton.jit
def e8m0_scale(value, axis: tl.constexpr, CEIL: tl.constexpr):
    """The bytes of the powers of two for groups along an axis, from the bits of their largest magnitudes."""
    largest = tl.max(value.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis)
    scale = (largest >> 23) - 8
    if CEIL:
        # 448 is 1.75 * 2 ** 8, and the mantissa bits of 1.75 are 0x600000.
        scale += ((largest & 0x7FFFFF) > 0x600000).to(tl.int32)
        scale = tl.where(largest == 0x7F800000, 254, scale)
    scale = tl.minimum(tl.maximum(scale, 0), 254)
    return tl.where(largest > 0x7F800000, 255, scale)


@triton.jit
def largest_bits(value, axis: tl.constexpr):
    """The largest magnitude along an axis, NaN where there is one, by one maximum: bits order as magnitudes do."""
    return tl.max(value.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis).to(tl.float32, bitcast=True)


@triton.jit
def hadamard_turned(row, D: tl.constexpr):
    """fp32 [D] times the Hadamard matrix over sqrt(D), D a power of two: fp64 sums, rounded once."""
    line = tl.arange(0, D)
    common = line[:, None] & line[None, :]
    common ^= common >> 8
    common ^= common >> 4
    common ^= common >> 2
    common ^= common >> 1
    wide = row.to(tl.float64)[:, None]
    SCALE: tl.constexpr = D**-0.5
    return (tl.sum(tl.where((common & 1) == 0, wide, -wide), 0) * SCALE).to(tl.float32)
