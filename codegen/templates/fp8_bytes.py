# pyright: basic
# Kernel text: inside @triton.jit, names are tensors of a language that type checkers do not know.
"""Bytes that hold e4m3 values and e8m0 scales."""

import triton
import triton.language as tl


@triton.jit
def e4m3_value(bits):
    """uint8 -> the fp32 value that its bits mean as e4m3, exactly; both codes of NaN give NaN."""
    bits = bits.to(tl.uint32)
    # Exponent and mantissa at the fp32 places; the biases differ by 120.
    magnitude = ((bits & 0x7F) << 20).to(tl.float32, bitcast=True) * 1329227995784915872903807060280344576.0
    magnitude = tl.where((bits & 0x7F) == 0x7F, float("nan"), magnitude)
    return tl.where((bits & 0x80) != 0, -magnitude, magnitude)


@triton.jit
def e8m0_value(bits):
    """uint8 -> the fp32 power of two that its bits mean as e8m0, exactly; 255 is NaN."""
    exponent = bits.to(tl.uint32)
    power = tl.where(exponent == 0, 0x00400000, exponent << 23).to(tl.uint32)
    return tl.where(exponent == 255, 0x7FC00000, power).to(tl.uint32).to(tl.float32, bitcast=True)
