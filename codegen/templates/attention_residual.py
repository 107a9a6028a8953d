# pyright: basic, reportCallIssue=false
# Kernel text: inside @triton.jit, names are tensors of a language that type checkers do not know.
"""Attention residuals in one pass: a program owns a token and reads each source once, with an online softmax."""

from typing import Any

import torch
import triton
import triton.language as tl
from triton import knobs

from kimigraph.codegen.templates.residual_rows import (
    behind_earlier_kernels,
    logits_of,
    normalised,
    source_rows,
    unchanged,
    vector,
)
from kimigraph.codegen.templates.rounding import narrow

INTERPRET = knobs.runtime.interpret
CONSTANTS: dict[str, Any] = {}


@triton.jit
def effective_query(query, norm_weight, STRIDE: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr):
    """The query times the norm's weight, in fp32."""
    effective = vector(query, STRIDE[0], D, BLOCK)
    if norm_weight is not None:
        effective *= vector(norm_weight, STRIDE[1], D, BLOCK)
    return effective


@triton.jit
def mix(
    source_0,
    source_1,
    source_2,
    source_3,
    source_4,
    source_5,
    source_6,
    source_7,
    source_8,
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
    FIRST: tl.constexpr,
    ROWS: tl.constexpr,
    FEW: tl.constexpr,
    EARLY: tl.constexpr,
    BLOCK: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """Tile by tile of sources; ``FIRST`` and ``ROWS`` give each one's first source and how many it has.

    The next tile is on its way while one is mixed. Of ``FEW`` tokens all weights are, too; of many, the cache has them,
    and registers are worth more.
    """
    sources = (source_0, source_1, source_2, source_3, source_4, source_5, source_6, source_7, source_8)
    behind_earlier_kernels(EARLY)
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    upcoming = source_rows(sources, token, SOURCE_STRIDE, ALIGNED, FIRST[0], ROWS[0], D, BLOCK)
    if FEW:
        effective = effective_query(query, norm_weight, WEIGHT_STRIDE, D, BLOCK)
        if out_norm_weight is not None:
            norm = vector(out_norm_weight, WEIGHT_STRIDE[2], D, BLOCK)
    mixed = tl.zeros([BLOCK], tl.float32)
    largest = tl.full([], float("-inf"), tl.float32)
    total = tl.zeros([], tl.float32)
    for tile in tl.static_range(len(ROWS)):
        rows = upcoming
        if tile + 1 < len(ROWS):
            upcoming = source_rows(sources, token, SOURCE_STRIDE, ALIGNED, FIRST[tile + 1], ROWS[tile + 1], D, BLOCK)
        if not FEW:
            effective = effective_query(query, norm_weight, WEIGHT_STRIDE, D, BLOCK)
        logit = logits_of(rows.to(tl.float32), effective, D, EPS)
        highest = tl.maximum(largest, tl.max(logit, 0))
        weight = tl.exp(logit - highest)
        kept = tl.exp(largest - highest)
        total = total * kept + tl.sum(weight, 0)
        mixed = mixed * kept + tl.sum(weight[:, None] * unchanged(rows, INTERPRET).to(tl.float32), 0)
        largest = highest
    mixed /= total
    if out_norm_weight is not None:
        if not FEW:
            norm = vector(out_norm_weight, WEIGHT_STRIDE[2], D, BLOCK)
        mixed = normalised(mixed, norm, D, OUT_EPS)
    tl.store(out + token * D + column, narrow(mixed, out, INTERPRET), mask=column < D)


def launch(sources, query, norm_weight=None, out_norm_weight=None, *, memory=torch):
    """The operator's tensors in schema order -> out, in the shape and type of the sources."""
    out = memory.empty(CONSTANTS["out"], dtype=sources[0].dtype, device=sources[0].device)
    absent = [None] * (9 - len(sources))
    mix[CONSTANTS["grid"]](
        *sources, *absent, query, norm_weight, out_norm_weight, out,
        **{**CONSTANTS["mix"], "INTERPRET": INTERPRET}, **CONSTANTS["options"],
    )  # fmt: skip
    return out
