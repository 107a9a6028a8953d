# pyright: basic, reportCallIssue=false
# Kernel text: inside @triton.jit, names are tensors of a language that type checkers do not know.
"""Finished blocks under several queries: a program owns a token and some queries, and holds all sources meanwhile."""

from typing import Any

import torch
import triton
import triton.language as tl
from triton import knobs

from kimigraph.codegen.templates.residual_rows import behind_earlier_kernels, logits_of, source_rows, unchanged, vector

INTERPRET = knobs.runtime.interpret
CONSTANTS: dict[str, Any] = {}


@triton.jit
def mix_history(
    source_0,
    source_1,
    source_2,
    source_3,
    source_4,
    source_5,
    source_6,
    source_7,
    source_8,
    query_0,
    query_1,
    query_2,
    query_3,
    query_4,
    query_5,
    query_6,
    query_7,
    norm_weight_0,
    norm_weight_1,
    norm_weight_2,
    norm_weight_3,
    norm_weight_4,
    norm_weight_5,
    norm_weight_6,
    norm_weight_7,
    mixture,
    lse,
    T: tl.constexpr,
    D: tl.constexpr,
    N: tl.constexpr,
    Q: tl.constexpr,
    EACH: tl.constexpr,
    NORMED: tl.constexpr,
    EARLY: tl.constexpr,
    EPS: tl.constexpr,
    SOURCE_STRIDE: tl.constexpr,
    ALIGNED: tl.constexpr,
    QUERY_STRIDE: tl.constexpr,
    NORM_STRIDE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """Queries from EACH times the program's second number on; a row behind the N sources repeats the first one."""
    sources = (source_0, source_1, source_2, source_3, source_4, source_5, source_6, source_7, source_8)
    queries = (query_0, query_1, query_2, query_3, query_4, query_5, query_6, query_7)
    norm_weights = (
        norm_weight_0,
        norm_weight_1,
        norm_weight_2,
        norm_weight_3,
        norm_weight_4,
        norm_weight_5,
        norm_weight_6,
        norm_weight_7,
    )
    behind_earlier_kernels(EARLY)
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    live = tl.arange(0, ROWS) < N
    rows = source_rows(sources, token, SOURCE_STRIDE, ALIGNED, 0, ROWS, D, BLOCK)
    for number in tl.static_range(Q):
        if tl.program_id(1) == number // EACH:
            effective = vector(queries[number], QUERY_STRIDE[number], D, BLOCK)
            if NORMED:
                effective *= vector(norm_weights[number], NORM_STRIDE[number], D, BLOCK)
            logit = logits_of(unchanged(rows, INTERPRET).to(tl.float32), effective, D, EPS)
            logit = tl.where(live, logit, float("-inf"))
            highest = tl.max(logit, 0)
            weight = tl.exp(logit - highest)
            total = tl.sum(weight, 0)
            share = weight / total
            mixed = tl.sum(share[:, None] * unchanged(rows, INTERPRET).to(tl.float32), 0)
            tl.store(mixture + (number * T + token) * D + column, mixed, mask=column < D)
            tl.store(lse + number * T + token, highest + tl.log(total))


def launch(sources, queries, norm_weights, *, memory=torch):
    """The operator's tensors in schema order -> (mixture [m, ..., D], lse [m, ...]), fp32."""
    mixture = memory.empty(CONSTANTS["mixture"], dtype=torch.float32, device=sources[0].device)
    lse = memory.empty(CONSTANTS["lse"], dtype=torch.float32, device=sources[0].device)
    mix_history[CONSTANTS["grid"]](
        *sources, *[None] * (9 - len(sources)), *queries, *[None] * (8 - len(queries)), *norm_weights,
        *[None] * (8 - len(norm_weights)), mixture, lse,
        **{**CONSTANTS["mix_history"], "INTERPRET": INTERPRET}, **CONSTANTS["options"],
    )  # fmt: skip
    return mixture, lse
