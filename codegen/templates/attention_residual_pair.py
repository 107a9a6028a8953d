# pyright: basic, reportCallIssue=false
# Kernel text: inside @triton.jit, names are tensors of a language that type checkers do not know.
"""The residual of two sources and the norm behind it in one reduction: a program owns a token.

The norm of a mixture follows from the sources' own products, |a x + b y|^2 = a^2 x.x + b^2 y.y + 2ab x.y, so that no
second sum has to wait for the first. Where two rows nearly cancel out that loses digits, but later than the rounding of
16-bit sources has lost them.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from triton import knobs

from kimigraph.codegen.templates.residual_rows import behind_earlier_kernels, source_rows, vector
from kimigraph.codegen.templates.rounding import narrow

INTERPRET = knobs.runtime.interpret
CONSTANTS: dict[str, Any] = {}


@triton.jit
def add_triples(a, b, c, d, e, f):
    """Three sums at once: one exchange between the warps serves all."""
    return a + d, b + e, c + f


@triton.jit
def multiply(a, b):
    """For the product of the rows of a tile."""
    return a * b


@triton.jit
def mix_pair(
    source_0,
    source_1,
    query,
    norm_weight,
    out_norm_weight,
    out,
    D: tl.constexpr,
    EPS: tl.constexpr,
    OUT_EPS: tl.constexpr,
    SOURCE_STRIDE: tl.constexpr,
    ALIGNED: tl.constexpr,
    WEIGHT_STRIDE: tl.constexpr,
    EARLY: tl.constexpr,
    BLOCK: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """All that a token needs is on its way before the first sum."""
    behind_earlier_kernels(EARLY)
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    rows = source_rows((source_0, source_1), token, SOURCE_STRIDE, ALIGNED, 0, 2, D, BLOCK)
    effective = vector(query, WEIGHT_STRIDE[0], D, BLOCK)
    if norm_weight is not None:
        effective *= vector(norm_weight, WEIGHT_STRIDE[1], D, BLOCK)
    norm = vector(out_norm_weight, WEIGHT_STRIDE[2], D, BLOCK)
    values = rows.to(tl.float32)
    cross = tl.reduce(values, 0, multiply)[None, :] + values * 0
    square, dot, cross = tl.reduce((values * values, values * effective[None, :], cross), 1, add_triples)
    logit = dot * tl.rsqrt(square / D + EPS)
    share = tl.exp(logit - tl.max(logit, 0))
    share = share / tl.sum(share, 0)
    total = tl.sum(share * share * square + share * (1 - share) * cross, 0)
    mixed = tl.sum(share[:, None] * values, 0) * tl.rsqrt(tl.maximum(total, 0.0) / D + OUT_EPS) * norm
    tl.store(out + token * D + column, narrow(mixed, out, INTERPRET), mask=column < D)


def launch(sources, query, norm_weight, out_norm_weight, *, memory=torch):
    """The operator's tensors in schema order -> out, in the shape and type of the sources."""
    out = memory.empty(CONSTANTS["out"], dtype=sources[0].dtype, device=sources[0].device)
    mix_pair[CONSTANTS["grid"]](
        *sources, query, norm_weight, out_norm_weight, out,
        **{**CONSTANTS["mix_pair"], "INTERPRET": INTERPRET}, **CONSTANTS["options"],
    )  # fmt: skip
    return out
