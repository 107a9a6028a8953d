# pyright: basic, reportGeneralTypeIssues=false
# Kernel text: inside @triton.jit, names are tensors of a language that type checkers do not know.
"""The scores of picked index keys: rows of keys are gathered, and meet the query's heads in one product."""

from typing import Any

import torch
import triton
import triton.language as tl
from triton import knobs

from kimigraph.codegen.templates.index_rows import key_offsets, load_channels, load_groups, rounded_groups

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
    key_row = keys + offset[:, None]
    scale_bytes = key_row
    if GROUP > 0:
        # Planes of PLANE keys and of the scales of their groups, in one page.
        GROUPS: tl.constexpr = (D + GROUP - 1) // GROUP
        page, slot = offset // (PLANE * (D + GROUPS)), offset % (PLANE * (D + GROUPS)) // (D + GROUPS)
        key_row = keys + (page * (PLANE * (D + GROUPS)) + slot * D)[:, None]
        scale_bytes = keys + (page * (PLANE * (D + GROUPS)) + PLANE * D + slot * GROUPS)[:, None]
    elif PLANE > 0:
        # Planes of PLANE keys and of their scales, in one page.
        page, slot = offset // (PLANE * (D + 4)), offset % (PLANE * (D + 4)) // (D + 4)
        key_row = keys + (page * (PLANE * (D + 4)) + slot * D)[:, None]
        scale_row = keys.to(tl.pointer_type(tl.float32)) + page * (PLANE * (D // 4 + 1)) + PLANE * (D // 4) + slot
        key_scale = tl.load(scale_row, mask=exists, other=0.0)
    score = tl.zeros([BLOCK_K], tl.float32)
    for head_block in tl.static_range(0, H, BLOCK_H):
        head = head_block + tl.arange(0, BLOCK_H)
        q_row = q + sequence * Q_STRIDE[0] + token * Q_STRIDE[1] + head[None, :] * Q_STRIDE[2]
        weight_row = weights + sequence * WEIGHT_STRIDE[0] + token * WEIGHT_STRIDE[1]
        weight = tl.load(weight_row + head * WEIGHT_STRIDE[2], mask=head < H, other=0.0).to(tl.float32)
        dots = tl.zeros([BLOCK_K, BLOCK_H], tl.float32)
        for channel in tl.static_range(0, D, BLOCK_D):
            if q_scales is not None:
                powers = q_scales + sequence * Q_SCALE_STRIDE[0] + token * Q_SCALE_STRIDE[1]
                powers += head[None, :] * Q_SCALE_STRIDE[2]
                query = load_groups(q_row, powers, (head < H)[None, :], channel, 0, D, GROUP, BLOCK_D, UPCAST)
            else:
                query = load_channels(q_row, (head < H)[None, :], channel, 0, D, Q_STRIDE[3], BLOCK_D, UPCAST, DECODED)
                if QUANTISES:
                    query = rounded_groups(query, GROUP)
            if GROUP > 0:
                tile = load_groups(key_row, scale_bytes, exists[:, None], channel, 1, D, GROUP, BLOCK_D, UPCAST)
            else:
                tile = load_channels(key_row, exists[:, None], channel, 1, D, KEY_STRIDE[2], BLOCK_D, UPCAST, DECODED)
            dots = tl.dot(tile, query, dots, input_precision="ieee")
        dots *= SCALE
        # Not a maximum: a NaN must reach the sum.
        weighted = tl.where(dots < 0.0, 0.0, dots) * weight[None, :]
        if H % BLOCK_H != 0:
            # A key with an infinity makes NaN in the padding heads.
            weighted = tl.where((head < H)[None, :], weighted, 0.0)
        score += tl.sum(weighted, 1)
    if PLANE > 0 and GROUP == 0:
        score *= key_scale
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
