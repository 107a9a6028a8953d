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


@triton.jit
def signals(flags, count):
    """Two programs that answer each other ``count`` times over ``flags`` [2] int32, zero before."""
    program = tl.program_id(0)
    for number in range(count):
        if program == 0:
            tl.atomic_xchg(flags, number + 1, sem="release", scope="gpu")
        while tl.atomic_add(flags + 1 - program, 0, sem="acquire", scope="gpu") <= number:
            pass
        if program == 1:
            tl.atomic_xchg(flags + 1, number + 1, sem="release", scope="gpu")


def run_nothing():
    """Launch ``nothing`` once."""
    nothing[(1,)]()


def run_polynomial(values, out, steps, block: Any = 1024):
    """Launch ``polynomial`` over all of ``values``, whose size is a multiple of ``block``."""
    polynomial[(values.numel() // block,)](values, out, steps, block)


def run_signals(flags, count):
    """Zero ``flags`` [2] int32 and launch ``signals``, whose two programs run at once."""
    flags.zero_()
    options: dict[str, Any] = {"launch_cooperative_grid": True}
    signals[(2,)](flags, count, **options)
