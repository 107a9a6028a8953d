# pyright: basic, reportGeneralTypeIssues=false
# Kernel text: inside @triton.jit, names are tensors of a language that type checkers do not know.
"""The scores of picked index keys: rows of keys are gathered, and meet the query's heads in one product."""

from typing import Any

import torch
import triton
import triton.language as tl
from triton import knobs

from kimigraph.codegen.templates.index_rows import key_offsets, key_planes, key_scores

INTERPRET = knobs.runtime.interpret
CONSTANTS: dict[str, Any] = {}


@triton.jit
def score_picks(
    q,
    keys,
    weights,
    picks,
    block_table,
    q_scales,
    scores,
    S: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    K: tl.constexpr,
    PAGE: tl.constexpr,
    SCALE: tl.constexpr,
    Q_STRIDE: tl.constexpr,
    KEY_STRIDE: tl.constexpr,
    WEIGHT_STRIDE: tl.constexpr,
    PICK_STRIDE: tl.constexpr,
    TABLE_STRIDE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    UPCAST: tl.constexpr,
    PLANE: tl.constexpr,
    GROUP: tl.constexpr,
    Q_SCALE_STRIDE: tl.constexpr,
    QUANTISES: tl.constexpr,
    DECODED: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """BLOCK_K picks of one query row; -inf where there is none. One order of sums for all: equal keys score equal."""
    TILES: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    index = tl.program_id(0)
    row = index // TILES
    sequence, token = (row // S).to(tl.int64), (row % S).to(tl.int64)
    place = index % TILES * BLOCK_K + tl.arange(0, BLOCK_K)
    pick_row = picks + sequence * PICK_STRIDE[0] + token * PICK_STRIDE[1]
    pick = tl.load(pick_row + place.to(tl.int64) * PICK_STRIDE[2], mask=place < K, other=-1)
    offset, exists = key_offsets(block_table, sequence, pick, pick >= 0, KEY_STRIDE, TABLE_STRIDE, PAGE)
    key_row, group_row, key_scale = key_planes(keys, offset, exists, D, PLANE, GROUP)
    score = key_scale * key_scores(
        q, weights, q_scales, sequence, token, None, key_row, group_row, exists,
        H, D, Q_STRIDE, KEY_STRIDE, WEIGHT_STRIDE, Q_SCALE_STRIDE, GROUP, QUANTISES, SCALE, 1.0, BLOCK_H, BLOCK_D,
        UPCAST, DECODED,
    )  # fmt: skip
    score = tl.where(exists & (score == score), score, float("-inf"))
    tl.store(scores + row.to(tl.int64) * K + place, tl.where(score == 0.0, 0.0, score), mask=place < K)


def launch(q, keys, weights, picks, block_table=None, q_scales=None, *, memory=torch):
    """The operator's tensors in schema order -> fp32 [B, S, k]."""
    scores = memory.empty(CONSTANTS["scores"], dtype=torch.float32, device=q.device)
    if q.dtype == torch.float8_e4m3fn:
        q = q.view(torch.uint8)
    constants = CONSTANTS["score_picks"]
    if INTERPRET:
        # The interpreter's products of 16-bit floats are wrong (bf16) or rounded (fp16).
        constants = {**constants, "UPCAST": True, "DECODED": "bits", "INTERPRET": True}
    score_picks[CONSTANTS["grid"]](
        q, keys, weights, picks, block_table, q_scales, scores, **constants, **CONSTANTS["options"]
    )
    return scores
