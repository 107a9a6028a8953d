# pyright: basic
# Kernel text: inside @triton.jit, names are tensors of a language that type checkers do not know.
"""The running sum joins the mixture of the finished blocks; a program owns a token."""

from typing import Any

import torch
import triton
import triton.language as tl
from triton import knobs

from kimigraph.codegen.templates.kda_gate import sigmoid
from kimigraph.codegen.templates.residual_rows import add_pairs, behind_earlier_kernels, normalised, vector
from kimigraph.codegen.templates.rounding import narrow

INTERPRET = knobs.runtime.interpret
CONSTANTS: dict[str, Any] = {}


@triton.jit
def merge(
    history,
    lse,
    partial,
    query,
    norm_weight,
    out_norm_weight,
    out,
    D: tl.constexpr,
    EPS: tl.constexpr,
    OUT_EPS: tl.constexpr,
    STRIDE: tl.constexpr,
    WEIGHT_STRIDE: tl.constexpr,
    EARLY: tl.constexpr,
    BLOCK: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """``STRIDE``: of a token in history, lse and partial."""
    behind_earlier_kernels(EARLY)
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < D
    value = tl.load(partial + token * STRIDE[2] + column, mask=inside, other=0.0).to(tl.float32)
    before = tl.load(history + token * STRIDE[0] + column, mask=inside, other=0.0)
    effective = vector(query, WEIGHT_STRIDE[0], D, BLOCK)
    if norm_weight is not None:
        effective *= vector(norm_weight, WEIGHT_STRIDE[1], D, BLOCK)
    if out_norm_weight is not None:
        norm = vector(out_norm_weight, WEIGHT_STRIDE[2], D, BLOCK)
    square, dot = tl.reduce((value * value, value * effective), 0, add_pairs)
    share = sigmoid(dot * tl.rsqrt(square / D + EPS) - tl.load(lse + token * STRIDE[1]))
    mixed = before + share * (value - before)
    if out_norm_weight is not None:
        mixed = normalised(mixed, norm, D, OUT_EPS)
    tl.store(out + token * D + column, narrow(mixed, out, INTERPRET), mask=inside)


def launch(history, lse, partial, query, norm_weight=None, out_norm_weight=None, *, memory=torch):
    """The operator's tensors in schema order -> out, in the shape and type of ``partial``."""
    out = memory.empty(CONSTANTS["out"], dtype=partial.dtype, device=partial.device)
    merge[CONSTANTS["grid"]](
        history, lse, partial, query, norm_weight, out_norm_weight, out,
        **{**CONSTANTS["merge"], "INTERPRET": INTERPRET}, **CONSTANTS["options"],
    )  # fmt: skip
    return out
