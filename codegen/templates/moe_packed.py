# pyright: basic, reportCallIssue=false, reportGeneralTypeIssues=false
# Kernel text: inside @triton.jit, names are tensors of a language that type checkers do not know.
"""Routed experts of a few tokens over MXFP4 weights: each pick streams its expert's codes, a tile of columns a program.

Matrix units multiply, since they take bf16, which two codes become in six instructions: lanes would take five for each
code and the product. Every sum has one order.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from triton import knobs

from kimigraph.codegen.templates.moe_activation import gated
from kimigraph.codegen.templates.moe_finish import activate_shared, finish_experts
from kimigraph.codegen.templates.moe_routing import choose
from kimigraph.codegen.templates.mxfp4_weights import matrix_rows, packed_tile
from kimigraph.codegen.templates.rounding import narrow, product

INTERPRET = knobs.runtime.interpret
CONSTANTS: dict[str, Any] = {}


@triton.jit
def add_packed(total, weights, begin, inside, rows, STRIDE: tl.constexpr, LIMIT: tl.constexpr, STEP: tl.constexpr,
               INTERPRET: tl.constexpr):  # fmt: skip
    """``total`` [TILE, 16] plus STEP columns of ``matrix_rows`` times a row, which is the first of 16 columns."""
    weight = packed_tile(weights, begin, inside, LIMIT, STEP, INTERPRET)
    depth = begin + tl.arange(0, STEP)
    column = tl.arange(0, 16)[None, :]
    mask = (depth < LIMIT)[:, None] & (column == 0)
    row = tl.load(rows + depth[:, None] * STRIDE + column * 0, mask=mask, other=0.0)
    if INTERPRET or row.dtype == tl.float32:
        total += product(weight, row, row.dtype, INTERPRET)
    else:
        total = tl.dot(weight, row, total)
    return total


@triton.jit
def open_packed(x, logits, bias, words, planes, shared_gate, shared_up, inner, chosen, shared, X_STRIDE: tl.constexpr,
                LOGIT_STRIDE: tl.constexpr, BIAS_STRIDE: tl.constexpr, SHARED_STRIDE: tl.constexpr,
                TOKENS: tl.constexpr, WIDTH: tl.constexpr, INNER: tl.constexpr, SHARED: tl.constexpr,
                GROUPS: tl.constexpr, MEMBERS: tl.constexpr, GROUP_PICKS: tl.constexpr, PICKS: tl.constexpr,
                RENORMALIZE: tl.constexpr, SCALE: tl.constexpr, GROUP_BLOCK: tl.constexpr,
                MEMBER_BLOCK: tl.constexpr, SITU: tl.constexpr, BETA: tl.constexpr, LINEAR_BETA: tl.constexpr,
                LIMIT: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr, BLOCK: tl.constexpr,
                INTERPRET: tl.constexpr):  # fmt: skip
    """``inner`` [tokens * picks, I] = weight times act(gate, up) of each pick, and the experts ``chosen``.

    ``words`` are the bytes of ``planes`` [E, 2 I, 17 D / 32] four at a time. Programs count the picks of a tile of
    columns, then the next tile; the last ones activate the shared experts.
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
        plane = expert.to(tl.int64) * (2 * INNER * (WIDTH // 32 * 17))
        opened = matrix_rows(words, planes, plane, column, 2 * INNER, WIDTH)
        beside = matrix_rows(words, planes, plane, INNER + column, 2 * INNER, WIDTH)
        rows = x + token * X_STRIDE[0]
        first = tl.zeros([TILE, 16], tl.float32)
        second = tl.zeros([TILE, 16], tl.float32)
        for start in range(0, WIDTH, STEP):
            first = add_packed(first, opened, start, inside, rows, X_STRIDE[1], WIDTH, STEP, INTERPRET)
            second = add_packed(second, beside, start, inside, rows, X_STRIDE[1], WIDTH, STEP, INTERPRET)
        hidden = gated(tl.sum(first, 1), tl.sum(second, 1), SITU, BETA, LINEAR_BETA, LIMIT, INTERPRET) * weight
        tl.store(inner + pick * INNER + column, narrow(hidden, inner, INTERPRET), mask=column < INNER)


@triton.jit
def close_packed(inner, chosen, words, planes, routed, TOKENS: tl.constexpr, WIDTH: tl.constexpr, INNER: tl.constexpr,
                 PICKS: tl.constexpr, PARTS: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr,
                 INTERPRET: tl.constexpr):  # fmt: skip
    """``routed`` [PARTS, tokens, D]: sums over the picks of a part, in order, of what their experts make of ``inner``.

    Programs count tokens, then the parts of the picks, then tiles of columns.
    """
    token = tl.program_id(0) % TOKENS
    part = tl.program_id(0) // TOKENS % PARTS
    column = tl.program_id(0) // (TOKENS * PARTS) * TILE + tl.arange(0, TILE)
    inside = (column < WIDTH)[:, None]
    each: tl.constexpr = PICKS // PARTS
    steps: tl.constexpr = (INNER + STEP - 1) // STEP
    total = tl.zeros([TILE, 16], tl.float32)
    for number in range(0, each * steps):
        pick = token * PICKS + part * each + number // steps
        plane = tl.load(chosen + pick).to(tl.int64) * (WIDTH * (INNER // 32 * 17))
        weights = matrix_rows(words, planes, plane, column, WIDTH, INNER)
        total = add_packed(total, weights, number % steps * STEP, inside, inner + pick * INNER, 1, INNER, STEP,
                           INTERPRET)  # fmt: skip
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
    open_packed[CONSTANTS["grids"]["open"]](
        x, logits, bias, gate_up.view(-1).view(torch.int32), gate_up, shared_gate, shared_up, inner, chosen, shared,
        **{**CONSTANTS["open_packed"], "INTERPRET": INTERPRET}, **options["open"],
    )  # fmt: skip
    finishes = up is not None or shared is not None or residual is not None
    routed = memory.empty(sizes["routed"], dtype=torch.float32, device=x.device) if finishes else out
    close_packed[CONSTANTS["grids"]["close"]](
        inner, chosen, down.view(-1).view(torch.int32), down, routed,
        **{**CONSTANTS["close_packed"], "INTERPRET": INTERPRET}, **options["close"],
    )  # fmt: skip
    if finishes:
        finish_experts[CONSTANTS["grids"]["finish"]](
            routed, norm_weight, up, shared, shared_down, residual, out,
            **{**CONSTANTS["finish_experts"], "INTERPRET": INTERPRET}, **options["finish"],
        )  # fmt: skip
    return out, chosen
