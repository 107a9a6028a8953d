# pyright: basic
# Kernel text: inside @triton.jit, names are tensors of a language that type checkers do not know.
"""Scores as integers."""

import triton
import triton.language as tl


@triton.jit
def order_code(score):
    """float32 -> uint32 with the same order; -0 as +0, NaN as -inf. No score gives 0, which marks hidden keys."""
    score = tl.where(score != score, float("-inf"), score)
    bits = tl.where(score == 0.0, 0.0, score).to(tl.uint32, bitcast=True)
    return bits ^ tl.where((bits >> 31) != 0, 0xFFFFFFFF, 0x80000000).to(tl.uint32)
