# pyright: basic, reportArgumentType=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# Kernel text: inside @triton.jit, names are tensors of a language that type checkers do not know.
"""What the kernels of attention residuals share: rows of several sources as one tile, their logits, norms."""

import triton
import triton.language as tl


@triton.jit
def behind_earlier_kernels(EARLY: tl.constexpr):
    """Let what follows start, and wait until all that came before has ended: launched ``EARLY``, a program may run
    while the kernel before its own still does.
    """
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def add_pairs(a, b, c, d):
    """Two sums at once: one exchange between the warps serves both."""
    return a + c, b + d


@triton.jit
def unchanged(value, INTERPRET: tl.constexpr):
    """``value``, but the compiler must not keep what it was widened to: 16-bit values stay packed in registers."""
    if INTERPRET or value.dtype.primitive_bitwidth != 16:
        same = value
    else:
        same = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [value], dtype=value.dtype, is_pure=False, pack=2)
    return same


@triton.jit
def source_rows(
    sources,
    token,
    STRIDES: tl.constexpr,
    ALIGNED: tl.constexpr,
    FIRST: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """ROWS sources from number FIRST on, at one token: [ROWS, BLOCK], zero behind column D.

    A row behind the last source is that of number FIRST once more.
    """
    row = tl.arange(0, ROWS)
    place = sources[FIRST] + token * STRIDES[FIRST] + row * 0
    for number in tl.static_range(1, ROWS):
        if FIRST + number < len(STRIDES):
            place = tl.where(row == number, sources[FIRST + number] + token * STRIDES[FIRST + number], place)
    column = tl.arange(0, BLOCK)[None, :]
    places = place[:, None] + column
    if ALIGNED:  # as each of the pointers is; what is chosen among them is not known to be
        places = tl.multiple_of(places, (1, 16))
    return tl.load(places, mask=column < D, other=0.0)


@triton.jit
def vector(pointer, STRIDE: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr):
    """A weight of D elements in fp32, zero behind them."""
    column = tl.arange(0, BLOCK)
    return tl.load(pointer + column * STRIDE, mask=column < D, other=0.0).to(tl.float32)


@triton.jit
def logits_of(values, effective, D: tl.constexpr, EPS: tl.constexpr):
    """The logit of each row: its product with the effective query over its root mean square."""
    square, dot = tl.reduce((values * values, values * effective[None, :]), 1, add_pairs)
    return dot * tl.rsqrt(square / D + EPS)


@triton.jit
def normalised(mixed, weight, D: tl.constexpr, EPS: tl.constexpr):
    """RMS norm of one row [BLOCK] of D values; what lies behind them is zero."""
    return mixed * tl.rsqrt(tl.sum(mixed * mixed, 0) / D + EPS) * weight
