# pyright: basic, reportAttributeAccessIssue=false
# Kernel text: inside @triton.jit, names are tensors of a language that type checkers do not know.
"""Functions that generated kernels use: a rounding that the interpreter gets wrong, and two that Triton lacks."""

import triton
import triton.language as tl


@triton.jit
def round_to_bf16(value, INTERPRET: tl.constexpr):
    """fp32 -> the nearest bf16 number, as fp32, ties to even; the interpreter's own cast truncates."""
    if INTERPRET:
        bits = value.to(tl.uint32, bitcast=True)
        nearest = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) << 16
        rounded = tl.where(value != value, value, nearest.to(tl.float32, bitcast=True))
    else:
        rounded = value.to(tl.bfloat16).to(tl.float32)
    return rounded


@triton.jit
def hyperbolic_tangent(x, INTERPRET: tl.constexpr):
    """tanh in fp32; CUDA's own, which the interpreter lacks: there a polynomial where exponentials would cancel."""
    if INTERPRET:
        square = x * x
        series = -5.70498872745e-3 * square + 2.06390887954e-2
        series = series * square - 5.37397155531e-2
        series = series * square + 1.33314422036e-1
        series = series * square - 3.33332819422e-1
        far = 1.0 - 2.0 / (tl.exp(2.0 * tl.abs(x)) + 1.0)
        result = tl.where(tl.abs(x) < 0.625, series * square * x + x, tl.where(x < 0.0, -far, far))
    else:
        result = tl.extra.cuda.libdevice.tanh(x)
    return result


@triton.jit
def log_one_plus(x):
    """log(1 + x) in fp32, to the last bits for small x too."""
    total = 1.0 + x
    corrected = tl.log(total) * (x / (total - 1.0))
    return tl.where(total == 1.0, x, tl.where(total == float("inf"), total, corrected))


@triton.jit
def plus_product(left, right, total, INTERPRET: tl.constexpr):
    """total + left @ right, in fp32; the interpreter multiplies the bits of bf16 numbers, so it gets wider ones."""
    if INTERPRET:
        total = tl.dot(left.to(tl.float32), right.to(tl.float32), total, input_precision="ieee")
    else:
        total = tl.dot(left, right, total)
    return total
