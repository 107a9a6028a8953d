# pyright: basic
# Kernel text: inside @triton.jit, names are tensors of a language that type checkers do not know.
"""Casts and products that the interpreter gets wrong for bf16: it truncates, and multiplies the raw bits."""

import triton
import triton.language as tl


@triton.jit
def narrow(value, out, INTERPRET: tl.constexpr):
    """fp32 -> the element type of ``out``, rounding to nearest even; the interpreter's own cast to bf16 truncates."""
    if INTERPRET and out.dtype.element_ty == tl.bfloat16:
        bits = value.to(tl.uint32, bitcast=True)
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.uint16)
        narrowed = tl.where(value != value, 0x7FC0, rounded).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        narrowed = value.to(out.dtype.element_ty)
    return narrowed


@triton.jit
def product(a, b, OPERAND: tl.constexpr, INTERPRET: tl.constexpr):
    """``a @ b`` with fp32 sums; operands in ``OPERAND``, under the interpreter in fp32."""
    if INTERPRET:
        result = tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        result = tl.dot(a.to(OPERAND), b.to(OPERAND), input_precision="ieee")
    return result
