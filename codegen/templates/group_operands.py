# pyright: basic, reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false
# Kernel text: inside @gluon.jit, names are tensors and constants of a language whose types say little to a checker.
"""MXFP8 in groups of 32 as operands of products: each group over the largest scale of its key, or head of a query.

bf16 holds all of it, to 120 binades below the largest; fp16, which takes two instructions for two values instead of
four, loses bits of groups more than 22 binades below. Channels stand in the order in which a thread finds them: its 32
bytes are a group.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def largest_byte(word):
    """The largest of the four bytes of an int."""
    high = gl.maximum((word >> 16) & 0xFF, (word >> 24) & 0xFF)
    low = gl.maximum(word & 0xFF, (word >> 8) & 0xFF)
    return gl.maximum(high, low)


@gluon.jit
def power_of_two(byte):
    """What a byte of E8M0 means, fp32; 255 is NaN."""
    bits = gl.where(byte == 0, 0x00400000, byte << 23)
    return gl.where(byte == 255, 0x7FC00000, bits).to(gl.float32, bitcast=True)


@gluon.jit
def factor_below(below):
    """2 ** (120 - below) as bf16 twice in an int; 0 where that is less than 2 ** -126."""
    return gl.maximum(247 - below, 0) * 0x00800080


@gluon.jit
def half_factor(below, SHIFT: gl.constexpr):
    """2 ** (SHIFT - below) as fp16 twice in an int; 0 where that is less than 2 ** -14."""
    return gl.maximum(SHIFT + 15 - below, 0) * 0x04000400


@gluon.jit
def half_pairs(four, factor):
    """The four e4m3 bytes of an int -> fp16 of value * factor, two ints of two."""
    return gl.inline_asm_elementwise(
        """
        {
        .reg .b16 low, high;
        .reg .b32 a0, a1;
        mov.b32 {low, high}, $2;
        cvt.rn.f16x2.e4m3x2 a0, low;
        cvt.rn.f16x2.e4m3x2 a1, high;
        mul.rn.f16x2 $0, a0, $3;
        mul.rn.f16x2 $1, a1, $3;
        }
        """,
        "=r,=r,r,r",
        [four, factor],
        dtype=(gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )


@gluon.jit
def half_pairs_by_bits(four, factor):
    """The same over 2 ** 8 without the conversion: ptxas 12.8 breaks it where the kernel made the code."""
    return gl.inline_asm_elementwise(
        """
        {
        .reg .b32 a0, a1, s0, s1;
        prmt.b32 a0, $2, 0, 0x1404;
        prmt.b32 a1, $2, 0, 0x3424;
        and.b32 s0, a0, 0x80008000;
        and.b32 s1, a1, 0x80008000;
        shr.b32 a0, a0, 1;
        shr.b32 a1, a1, 1;
        and.b32 a0, a0, 0x3f803f80;
        and.b32 a1, a1, 0x3f803f80;
        or.b32 a0, a0, s0;
        or.b32 a1, a1, s1;
        mul.rn.f16x2 $0, a0, $3;
        mul.rn.f16x2 $1, a1, $3;
        }
        """,
        "=&r,=&r,r,r",
        [four, factor],
        dtype=(gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )


@gluon.jit
def scaled_pairs(four, factor):
    """The four e4m3 bytes of an int -> bf16 of value * factor / 2 ** 120, two ints of two."""
    return gl.inline_asm_elementwise(
        """
        {
        .reg .b32 a0, a1;
        prmt.b32 a0, $2, 0, 0x9180;
        prmt.b32 a1, $2, 0, 0xb3a2;
        shl.b32 a0, a0, 4;
        shl.b32 a1, a1, 4;
        and.b32 a0, a0, 0x87f087f0;
        and.b32 a1, a1, 0x87f087f0;
        mul.rn.bf16x2 $0, a0, $3;
        mul.rn.bf16x2 $1, a1, $3;
        }
        """,
        "=r,=r,r,r",
        [four, factor],
        dtype=(gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )


@gluon.jit
def halves_of(pair):
    """The two 16-bit parts of an int."""
    return gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;", "=h,=h,r", [pair], dtype=(gl.int16, gl.int16), is_pure=True, pack=1
    )


@gluon.jit
def in_order(first, second):
    """Pairs of [rows, 4 groups, slices] -> [rows, slices, 2, 4]: the order of the products."""
    return gl.permute(gl.join(first, second), (0, 2, 3, 1))


@gluon.jit
def as_operand(four, factor, PRODUCT: gl.constexpr, TYPE: gl.constexpr):
    """[rows, 4 groups, slices] ints of four bytes as the left side of a product: [rows, 16 * slices]."""
    if TYPE == gl.float16:
        first, second = half_pairs(four, factor)
    else:
        first, second = scaled_pairs(four, factor)
    low, high = halves_of(in_order(first, second))
    values = gl.reshape(gl.join(low, high), [four.shape[0], 16 * four.shape[2]])
    values = values.to(TYPE, bitcast=True)
    return gl.convert_layout(values, gl.DotOperandLayout(0, PRODUCT, 2), assert_trivial=True)


@gluon.jit
def scale_bytes(pairs):
    """The bytes of E8M0 for [.., 32 values as 16 ints of two bf16], rounded up: ``e8m0_scale`` along the last axis."""
    largest = gl.max(gl.maximum((pairs << 16) & 0x7FFFFFFF, pairs & 0x7FFF0000), 2)
    # 448 is 1.75 * 2 ** 8, and the mantissa bits of 1.75 are 0x600000.
    byte = (largest >> 23) - 8 + ((largest & 0x7FFFFF) > 0x600000).to(gl.int32)
    byte = gl.where(largest == 0x7F800000, 254, gl.minimum(gl.maximum(byte, 0), 254))
    return gl.where(largest > 0x7F800000, 255, byte)


@gluon.jit
def codes_of(first, second, inverse):
    """Four bf16 in two ints, times ``inverse`` -> the four bytes of the nearest e4m3."""
    return gl.inline_asm_elementwise(
        """
        {
        .reg .b32 high0, high1;
        .reg .f32 v0, v1, v2, v3;
        .reg .b16 low, high;
        shl.b32 high0, $1, 16;
        shl.b32 high1, $2, 16;
        mov.b32 v0, high0;
        mov.b32 v2, high1;
        and.b32 high0, $1, 0xffff0000;
        and.b32 high1, $2, 0xffff0000;
        mov.b32 v1, high0;
        mov.b32 v3, high1;
        mul.rn.f32 v0, v0, $3;
        mul.rn.f32 v1, v1, $3;
        mul.rn.f32 v2, v2, $3;
        mul.rn.f32 v3, v3, $3;
        cvt.rn.satfinite.e4m3x2.f32 low, v1, v0;
        cvt.rn.satfinite.e4m3x2.f32 high, v3, v2;
        mov.b32 $0, {low, high};
        }
        """,
        "=r,r,r,f",
        [first, second, inverse],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def query_groups(q_row, scale_row, H: gl.constexpr, Q_STRIDE: gl.constexpr, Q_SCALE_STRIDE: gl.constexpr):
    """The queries of a row in groups: codes as ints of four [H, 4, 8], and the bytes of their scales [H, 4].

    Without ``scale_row`` they are bf16, and quantised here.
    """
    WORDS: gl.constexpr = gl.BlockedLayout([1, 1, 8], [8, 4, 1], [gl.num_warps(), 1, 1], [2, 1, 0])
    PAIRS: gl.constexpr = gl.BlockedLayout([1, 1, 16], [8, 4, 1], [gl.num_warps(), 1, 1], [2, 1, 0])
    LAYOUT: gl.constexpr = PAIRS if scale_row is None else WORDS
    INTS: gl.constexpr = 16 if scale_row is None else 8
    BY_GROUP: gl.constexpr = gl.SliceLayout(2, LAYOUT)
    head = gl.expand_dims(gl.arange(0, H, layout=gl.SliceLayout(1, BY_GROUP)), 1)
    group = gl.expand_dims(gl.arange(0, 4, layout=gl.SliceLayout(0, BY_GROUP)), 0)
    place = gl.arange(0, INTS, layout=gl.SliceLayout(0, gl.SliceLayout(0, LAYOUT)))
    place = gl.expand_dims(gl.expand_dims(place, 0), 0)
    place += gl.expand_dims(head * (Q_STRIDE[2] // (32 // INTS)) + group * INTS, 2)
    ints = gl.load(q_row.to(gl.pointer_type(gl.int32)) + place, cache_modifier=".cg")
    if scale_row is None:
        byte = scale_bytes(ints)
        first, second = gl.split(gl.reshape(ints, [H, 4, 8, 2]))
        first = gl.convert_layout(first, WORDS, assert_trivial=True)
        second = gl.convert_layout(second, WORDS, assert_trivial=True)
        byte = gl.convert_layout(byte, gl.SliceLayout(2, WORDS), assert_trivial=True)
        inverse = power_of_two(gl.where(byte == 255, 255, 254 - byte))
        ints = codes_of(first, second, gl.expand_dims(inverse, 2))
    else:
        byte = gl.load(scale_row + head * Q_SCALE_STRIDE[2] + group, cache_modifier=".cg").to(gl.int32)
    return ints, byte


@gluon.jit
def query_pairs(four, below, TYPE: gl.constexpr):
    """[heads, 4 groups, slices] ints of four bytes, ``below`` the largest scale of their head -> pairs in order."""
    if TYPE == gl.float16:
        first, second = half_pairs_by_bits(four, gl.convert_layout(half_factor(below, 15), four.type.layout))
    else:
        first, second = scaled_pairs(four, gl.convert_layout(factor_below(below), four.type.layout))
    return gl.reshape(in_order(first, second), [four.shape[0], 8 * four.shape[2]])


@gluon.jit
def store_query(
    query_tile, q_row, scale_row, H: gl.constexpr, Q_STRIDE: gl.constexpr, Q_SCALE_STRIDE: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    """Bring the queries of a row to shared memory over the largest scales of their heads, 64 channels a tile. Returns
    these scales, and how many binades the smallest of any head lies below its largest."""
    PAIRS: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)
    TYPE: gl.constexpr = query_tile.dtype
    words, byte = query_groups(q_row, scale_row, H, Q_STRIDE, Q_SCALE_STRIDE)
    largest = gl.max(byte, 1)
    below = gl.expand_dims(largest, 1) - byte
    first, second = gl.split(gl.permute(gl.reshape(words, [H, 4, 2, 4]), (0, 1, 3, 2)))
    left = query_pairs(first, gl.expand_dims(below, 2), TYPE)
    right = query_pairs(second, gl.expand_dims(below, 2), TYPE)
    query_tile.index(0)._reinterpret(gl.int32, [H, 32], PAIRS).store(left)
    query_tile.index(1)._reinterpret(gl.int32, [H, 32], PAIRS).store(right)
    return power_of_two(gl.convert_layout(largest, LAYOUT)), gl.max(gl.max(below, 1), 0)
