# pyright: basic
# Kernel text: inside @triton.jit, names are tensors of a language that type checkers do not know.
"""The gate of Kimi Delta Attention, for every kernel that decays a state: prefill, decode and what replays either."""

import triton
import triton.language as tl


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x)), by the cheap power of two; one that overflows to infinity gives the right 0."""
    return 1.0 / (1.0 + tl.exp2(-1.4426950408889634 * x))


@triton.jit
def softplus(x):
    """log(1 + exp(x)) without overflow; the two terms of the series keep what 1 + small would lose."""
    small = tl.exp(-tl.abs(x))
    return tl.maximum(x, 0.0) + tl.where(small < 1e-4, small - 0.5 * small * small, tl.log(1.0 + small))


@triton.jit
def log_decay(logit, rate, LOWER_BOUND: tl.constexpr):
    """g <= 0 of a gate logit with its bias, ``rate`` = exp(a_log): unbounded, or above ``LOWER_BOUND``."""
    if LOWER_BOUND is None:
        g = -rate * softplus(logit)
    else:
        g = LOWER_BOUND * sigmoid(rate * logit)
    return g
