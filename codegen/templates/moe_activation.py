# pyright: basic
# Kernel text: inside @triton.jit, names are tensors of a language that type checkers do not know.
"""The gated activations of experts: SwiGLU and SiTU, in fp32."""

import triton
import triton.language as tl

from kimigraph.codegen.templates.pointwise_math import hyperbolic_tangent


@triton.jit
def gated(gate, linear, SITU: tl.constexpr, BETA: tl.constexpr, LINEAR_BETA: tl.constexpr,
          LIMIT: tl.constexpr, INTERPRET: tl.constexpr):  # fmt: skip
    """silu(gate) linear, or with ``SITU`` both bounded by hyperbolic tangents; LINEAR_BETA 0 leaves linear as it is.

    A ``LIMIT`` above 0 bounds gate from above and linear on both sides first.
    """
    if LIMIT > 0.0:
        gate = tl.minimum(gate, LIMIT)
        linear = tl.minimum(tl.maximum(linear, -LIMIT), LIMIT)
    opened = 1.0 / (1.0 + tl.exp(-gate))
    if SITU:
        bounded = BETA * hyperbolic_tangent(gate / BETA, INTERPRET)
        if LINEAR_BETA > 0.0:
            linear = LINEAR_BETA * hyperbolic_tangent(linear / LINEAR_BETA, INTERPRET)
    else:
        bounded = gate
    return bounded * opened * linear
