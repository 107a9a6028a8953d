# pyright: basic
# Kernel text: inside @triton.jit, names are tensors of a language that type checkers do not know.
"""The gated activations of experts: SwiGLU and SiTU, in fp32."""

import triton
import triton.language as tl

from kimigraph.codegen.templates.pointwise_math import quotient


@triton.jit
def bounded_power(x, FACTOR: tl.constexpr, MOST: tl.constexpr):
    """2^(FACTOR x), at most 2^MOST; NaN stays NaN."""
    return tl.exp2(tl.minimum(x * FACTOR, MOST, propagate_nan=tl.PropagateNan.ALL))


@triton.jit
def gated(gate, linear, SITU: tl.constexpr, BETA: tl.constexpr, LINEAR_BETA: tl.constexpr,
          LIMIT: tl.constexpr, INTERPRET: tl.constexpr):  # fmt: skip
    """silu(gate) linear, or with ``SITU`` both bounded by hyperbolic tangents; LINEAR_BETA 0 leaves linear as it is.

    A ``LIMIT`` above 0 bounds gate from above and linear on both sides first. tanh(x) is (e - 1) / (e + 1) with
    e = exp(2 x), and so is sigmoid a quotient: all are one division. Beyond 2^30 nothing of e + 1 is left but e.
    """
    if LIMIT > 0.0:
        gate = tl.minimum(gate, LIMIT)
        linear = tl.minimum(tl.maximum(linear, -LIMIT), LIMIT)
    if SITU:
        power = bounded_power(gate, 2.8853900817779268 / BETA, 30.0)
        if BETA == 4.0:
            opened = power * power  # exp(gate)
        else:
            opened = bounded_power(gate, 1.4426950408889634, 60.0)
        above = (power - 1.0) * opened
        below = (power + 1.0) * (1.0 + opened)
        scale: tl.constexpr = BETA * LINEAR_BETA if LINEAR_BETA > 0.0 else BETA
        if LINEAR_BETA > 0.0:
            power = bounded_power(linear, 2.8853900817779268 / LINEAR_BETA, 30.0)
            above *= power - 1.0
            below *= power + 1.0
            hidden = quotient(above, below, INTERPRET) * scale
        else:
            hidden = quotient(above, below, INTERPRET) * scale * linear
    else:
        hidden = quotient(gate, 1.0 + tl.exp(-gate), INTERPRET) * linear
    return hidden
