# pyright: basic, reportArgumentType=false
# Kernel text: inside @triton.jit, names are tensors of a language that type checkers do not know.
"""The gate of Kimi Delta Attention, for every kernel that decays a state: prefill, decode and what replays either."""

import triton
import triton.language as tl


@triton.jit
def logistic(x, CHEAP: tl.constexpr = False):
    """1 / (1 + 2^-x); a power that overflows to infinity gives the right 0.

    ``CHEAP`` errs by two units more in the last place, for gates of what is then rounded to 16 bits.
    """
    if CHEAP:
        root = tl.rsqrt(1.0 + tl.exp2(-x))
        share = root * root
    else:
        share = 1.0 / (1.0 + tl.exp2(-x))
    return share


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x)), by the cheap power of two."""
    return logistic(1.4426950408889634 * x)


@triton.jit
def softplus(x):
    """log(1 + exp(x)) without overflow; the two terms of the series keep what 1 + small would lose."""
    small = tl.exp(-tl.abs(x))
    return tl.maximum(x, 0.0) + tl.where(small < 1e-4, small - 0.5 * small * small, tl.log(1.0 + small))


@triton.jit
def log_decay(logit, rate, LOWER_BOUND: tl.constexpr, CHEAP: tl.constexpr = False):
    """g <= 0 of a gate logit with its bias, ``rate`` = exp(a_log): unbounded, or above ``LOWER_BOUND``."""
    if LOWER_BOUND is None:
        g = -rate * softplus(logit)
    else:
        g = LOWER_BOUND * logistic((1.4426950408889634 * rate) * logit, CHEAP)
    return g
