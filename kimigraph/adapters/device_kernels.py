# pyright: basic
# Kernel text: inside @triton.jit, names are tensors of a language that type checkers do not know.
"""Kernels whose time says what a device can do."""

from typing import Any

import triton
import triton.language as tl


@triton.jit
def nothing():
    """Do nothing."""


@triton.jit
def polynomial(values, out, steps, block: tl.constexpr):
    """Every element: ``steps`` fused multiply-adds."""
    offsets = tl.program_id(0) * block + tl.arange(0, block)
    x = tl.load(values + offsets)
    y = x
    for _ in range(steps):
        y = y * x + x
    tl.store(out + offsets, y)


def run_nothing():
    """Launch ``nothing`` once."""
    nothing[(1,)]()


def run_polynomial(values, out, steps, block: Any = 1024):
    """Launch ``polynomial`` over all of ``values``, whose size is a multiple of ``block``."""
    polynomial[(values.numel() // block,)](values, out, steps, block)
