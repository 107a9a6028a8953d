# pyright: basic, reportAssignmentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# Kernel text: inside @triton.jit, names are tensors of a language that type checkers do not know.
"""Routed experts of a few tokens: every pick streams its expert's weights, a tile of columns a program.

Picks of one expert are neighbours in time, so that the cache serves all but the first. Every sum has one order.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from triton import knobs

from kimigraph.codegen.templates.moe_activation import gated
from kimigraph.codegen.templates.moe_finish import activate_shared, finish_experts
from kimigraph.codegen.templates.moe_routing import choose
from kimigraph.codegen.templates.rounding import narrow, product

INTERPRET = knobs.runtime.interpret
CONSTANTS: dict[str, Any] = {}


@triton.jit
def accumulate(total, places, inside, rows, start, LIMIT: tl.constexpr, STRIDE: tl.constexpr, STEP: tl.constexpr,
               DOT: tl.constexpr, INTERPRET: tl.constexpr):  # fmt: skip
    """``total`` plus STEP products of weight rows at ``places`` [TILE, 1] and one row: in lanes, or by matrix units.

    With ``DOT`` the row is the first of 16 columns, ``STRIDE`` is a pair: of the weight and of the row.
    """
    depth = start + tl.arange(0, STEP)
    if LIMIT % STEP == 0:
        weight = tl.load(places + depth[None, :] * STRIDE[0], mask=inside, other=0.0, eviction_policy="evict_first")
    else:
        mask = inside & (depth < LIMIT)[None, :]
        weight = tl.load(places + depth[None, :] * STRIDE[0], mask=mask, other=0.0, eviction_policy="evict_first")
    if DOT:
        column = tl.arange(0, 16)[None, :]
        mask = (depth < LIMIT)[:, None] & (column == 0)
        row = tl.load(rows + depth[:, None] * STRIDE[1] + column * 0, mask=mask, other=0.0)
        if INTERPRET:
            total += product(weight, row, weight.dtype, INTERPRET)
        else:
            total = tl.dot(weight, row, total)
    else:
        row = tl.load(rows + depth * STRIDE[1], mask=depth < LIMIT, other=0.0)
        total += weight.to(tl.float32) * row.to(tl.float32)[None, :]
    return total


@triton.jit
def open_experts(x, logits, bias, gate_up, shared_gate, shared_up, inner, chosen, shared, X_STRIDE: tl.constexpr,
                 LOGIT_STRIDE: tl.constexpr, BIAS_STRIDE: tl.constexpr, GATE_STRIDE: tl.constexpr,
                 SHARED_STRIDE: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr, INNER: tl.constexpr,
                 SHARED: tl.constexpr, GROUPS: tl.constexpr, MEMBERS: tl.constexpr, GROUP_PICKS: tl.constexpr,
                 PICKS: tl.constexpr, RENORMALIZE: tl.constexpr, SCALE: tl.constexpr, GROUP_BLOCK: tl.constexpr,
                 MEMBER_BLOCK: tl.constexpr, SITU: tl.constexpr, BETA: tl.constexpr, LINEAR_BETA: tl.constexpr,
                 LIMIT: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr, DOT: tl.constexpr, BLOCK: tl.constexpr,
                 INTERPRET: tl.constexpr):  # fmt: skip
    """``inner`` [tokens * picks, I] = weight times act(gate, up) of each pick, and the experts ``chosen``.

    Programs count the picks of a tile of columns, then the next tile; the last ones activate the shared experts.
    """
    program = tl.program_id(0)
    tiles: tl.constexpr = (INNER + TILE - 1) // TILE
    if program >= TOKENS * PICKS * tiles:
        activate_shared(shared_gate, shared_up, shared, program - TOKENS * PICKS * tiles, TOKENS, SHARED, SHARED_STRIDE,
                        SITU, BETA, LINEAR_BETA, LIMIT, BLOCK, INTERPRET)  # fmt: skip
    else:
        pick, tile = program % (TOKENS * PICKS), program // (TOKENS * PICKS)
        token = pick // PICKS
        expert, weight = choose(logits, bias, token, pick % PICKS, LOGIT_STRIDE, BIAS_STRIDE, GROUPS, MEMBERS,
                                GROUP_PICKS, PICKS, RENORMALIZE, SCALE, GROUP_BLOCK, MEMBER_BLOCK)  # fmt: skip
        if tile == 0:
            tl.store(chosen + pick, expert)
        column = tile * TILE + tl.arange(0, TILE)
        inside = (column < INNER)[:, None]
        opened = gate_up + expert.to(tl.int64) * GATE_STRIDE[0] + column[:, None] * GATE_STRIDE[1]
        linear = opened + INNER * GATE_STRIDE[1]
        rows = x + token * X_STRIDE[0]
        strides: tl.constexpr = (GATE_STRIDE[2], X_STRIDE[1])
        first = tl.zeros([TILE, 16 if DOT else STEP], tl.float32)
        second = tl.zeros([TILE, 16 if DOT else STEP], tl.float32)
        for start in range(0, WIDTH, STEP):
            first = accumulate(first, opened, inside, rows, start, WIDTH, strides, STEP, DOT, INTERPRET)
            second = accumulate(second, linear, inside, rows, start, WIDTH, strides, STEP, DOT, INTERPRET)
        hidden = gated(tl.sum(first, 1), tl.sum(second, 1), SITU, BETA, LINEAR_BETA, LIMIT, INTERPRET) * weight
        tl.store(inner + pick * INNER + column, narrow(hidden, inner, INTERPRET), mask=column < INNER)


@triton.jit
def close_experts(inner, chosen, down, routed, DOWN_STRIDE: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr,
                  INNER: tl.constexpr, PICKS: tl.constexpr, PARTS: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr,
                  DOT: tl.constexpr, INTERPRET: tl.constexpr):  # fmt: skip
    """``routed`` [PARTS, tokens, D]: sums over the picks of a part, in order, of what their experts make of ``inner``.

    Programs count tokens, then the parts of the picks, then tiles of columns.
    """
    token = tl.program_id(0) % TOKENS
    part = tl.program_id(0) // TOKENS % PARTS
    column = tl.program_id(0) // (TOKENS * PARTS) * TILE + tl.arange(0, TILE)
    inside = (column < WIDTH)[:, None]
    each: tl.constexpr = PICKS // PARTS
    steps: tl.constexpr = (INNER + STEP - 1) // STEP
    strides: tl.constexpr = (DOWN_STRIDE[2], 1)
    total = tl.zeros([TILE, 16 if DOT else STEP], tl.float32)
    for number in range(0, each * steps):
        pick = token * PICKS + part * each + number // steps
        expert = tl.load(chosen + pick).to(tl.int64)
        places = down + expert * DOWN_STRIDE[0] + column[:, None] * DOWN_STRIDE[1]
        rows = inner + pick * INNER
        total = accumulate(total, places, inside, rows, number % steps * STEP, INNER, strides, STEP, DOT, INTERPRET)
    out = routed + (part * TOKENS + token) * WIDTH + column
    tl.store(out, narrow(tl.sum(total, 1), routed, INTERPRET), mask=column < WIDTH)


def launch(
    x,
    logits,
    bias,
    gate_up,
    down,
    norm_weight=None,
    up=None,
    shared_gate=None,
    shared_up=None,
    shared_down=None,
    residual=None,
    *,
    memory=torch,
):
    """The operator's tensors in schema order -> (out, the experts chosen)."""
    sizes, options = CONSTANTS["sizes"], CONSTANTS["options"]
    scratch = {"dtype": x.dtype, "device": x.device}
    inner = memory.empty(sizes["inner"], **scratch)
    chosen = memory.empty(sizes["chosen"], dtype=torch.int32, device=x.device)
    shared = None if shared_down is None else memory.empty(sizes["shared"], **scratch)
    out = memory.empty(sizes["out"], **scratch)
    open_experts[CONSTANTS["grids"]["open"]](
        x, logits, bias, gate_up, shared_gate, shared_up, inner, chosen, shared,
        **{**CONSTANTS["open_experts"], "INTERPRET": INTERPRET}, **options["open"],
    )  # fmt: skip
    finishes = up is not None or shared is not None or residual is not None
    routed = memory.empty(sizes["routed"], dtype=torch.float32, device=x.device) if finishes else out
    close_experts[CONSTANTS["grids"]["close"]](
        inner, chosen, down, routed, **{**CONSTANTS["close_experts"], "INTERPRET": INTERPRET}, **options["close"]
    )
    if finishes:
        finish_experts[CONSTANTS["grids"]["finish"]](
            routed, norm_weight, up, shared, shared_down, residual, out,
            **{**CONSTANTS["finish_experts"], "INTERPRET": INTERPRET}, **options["finish"],
        )  # fmt: skip
    return out, chosen
