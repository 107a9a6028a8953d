# pyright: basic, reportCallIssue=false, reportGeneralTypeIssues=false
# Kernel text: inside @triton.jit, names are tensors of a language that type checkers do not know.
"""Routed experts of many tokens: picks are listed by expert, and a program multiplies a tile of one expert's picks.

An expert's list has no order of its own: it decides in which row of a tile a pick lies, never what comes out. The sum
over the picks of a token has one order.
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
def route_tokens(logits, bias, chosen, weight, counts, members, LOGIT_STRIDE: tl.constexpr, BIAS_STRIDE: tl.constexpr,
                 TOKENS: tl.constexpr, GROUPS: tl.constexpr, MEMBERS: tl.constexpr, GROUP_PICKS: tl.constexpr,
                 PICKS: tl.constexpr, RENORMALIZE: tl.constexpr, SCALE: tl.constexpr, GROUP_BLOCK: tl.constexpr,
                 MEMBER_BLOCK: tl.constexpr, PICK_BLOCK: tl.constexpr):  # fmt: skip
    """The experts of one token and their weights; its picks join the lists of their experts."""
    token = tl.program_id(0)
    place = tl.arange(0, PICK_BLOCK)
    expert, share = choose(logits, bias, token, place, LOGIT_STRIDE, BIAS_STRIDE, GROUPS, MEMBERS, GROUP_PICKS, PICKS,
                           RENORMALIZE, SCALE, GROUP_BLOCK, MEMBER_BLOCK)  # fmt: skip
    mask = place < PICKS
    pick = token * PICKS + place
    tl.store(chosen + pick, expert, mask=mask)
    tl.store(weight + pick, share, mask=mask)
    slot = tl.atomic_add(counts + expert, 1, mask=mask, sem="relaxed")
    tl.store(members + expert.to(tl.int64) * TOKENS + slot, pick, mask=mask)


@triton.jit
def tile_of(counts, number, EXPERTS: tl.constexpr, EXPERT_BLOCK: tl.constexpr, LINES: tl.constexpr):
    """The expert of the ``number``-th tile of LINES picks, EXPERTS behind the last; its first pick, its picks."""
    expert = tl.arange(0, EXPERT_BLOCK)
    count = tl.load(counts + expert, mask=expert < EXPERTS, other=0)
    ends = tl.cumsum((count + LINES - 1) // LINES, 0)
    found = tl.sum((ends <= number).to(tl.int32), 0)
    before = tl.max(tl.where(ends <= number, ends, 0), 0)
    return tl.minimum(found, EXPERTS), (number - before) * LINES, tl.sum(tl.where(expert == found, count, 0), 0)


@triton.jit
def weight_rows(weights, words, expert, column, ROWS: tl.constexpr, LIMIT: tl.constexpr, STRIDE: tl.constexpr):
    """Where rows of an expert's weight [ROWS, LIMIT] begin; of MXFP4, whose bytes ``words`` has four at a time, those
    of codes and of scales."""
    plane = expert.to(tl.int64) * STRIDE[0]
    if words is not None:
        places = matrix_rows(words, weights, plane, column, ROWS, LIMIT)
    else:
        places = weights + plane + column[:, None] * STRIDE[1]
    return places


@triton.jit
def weight_tile(places, words, begin, inside, LIMIT: tl.constexpr, STRIDE: tl.constexpr, STEP: tl.constexpr,
                OPERAND: tl.constexpr, INTERPRET: tl.constexpr):  # fmt: skip
    """[TILE, STEP] of a weight whose rows begin at ``places``, from column ``begin`` on."""
    depth = begin + tl.arange(0, STEP)
    if words is not None:
        tile = packed_tile(places, begin, inside, LIMIT, STEP, INTERPRET).to(OPERAND)
    elif LIMIT % STEP == 0:
        tile = tl.load(places + depth[None, :] * STRIDE, mask=inside, other=0.0)
    else:
        tile = tl.load(places + depth[None, :] * STRIDE, mask=inside & (depth < LIMIT)[None, :], other=0.0)
    return tile


@triton.jit
def multiplied(total, weight, rows, INTERPRET: tl.constexpr):
    """``total`` plus ``weight @ rows``; fp32 operands keep their precision."""
    if INTERPRET or weight.dtype == tl.float32:
        total += product(weight, rows, weight.dtype, INTERPRET)
    else:
        total = tl.dot(weight, rows, total)
    return total


@triton.jit
def open_groups(x, gate_up, words, weight, counts, members, shared_gate, shared_up, inner, shared,
                X_STRIDE: tl.constexpr, GATE_STRIDE: tl.constexpr, SHARED_STRIDE: tl.constexpr, TOKENS: tl.constexpr,
                WIDTH: tl.constexpr, INNER: tl.constexpr, SHARED: tl.constexpr, EXPERTS: tl.constexpr,
                EXPERT_BLOCK: tl.constexpr, PICKS: tl.constexpr, ROW_TILES: tl.constexpr, SITU: tl.constexpr,
                BETA: tl.constexpr, LINEAR_BETA: tl.constexpr, LIMIT: tl.constexpr, LINES: tl.constexpr,
                TILE: tl.constexpr, STEP: tl.constexpr, BLOCK: tl.constexpr, INTERPRET: tl.constexpr):  # fmt: skip
    """``inner`` [tokens * picks, I]: LINES picks of an expert, TILE columns; programs behind the last tile end."""
    column_tiles: tl.constexpr = (INNER + TILE - 1) // TILE
    program = tl.program_id(0)
    if program >= ROW_TILES * column_tiles:
        activate_shared(shared_gate, shared_up, shared, program - ROW_TILES * column_tiles, TOKENS, SHARED,
                        SHARED_STRIDE, SITU, BETA, LINEAR_BETA, LIMIT, BLOCK, INTERPRET)  # fmt: skip
    else:
        expert, start, count = tile_of(counts, program // column_tiles, EXPERTS, EXPERT_BLOCK, LINES)
        if expert < EXPERTS:
            line = start + tl.arange(0, LINES)
            pick = tl.load(members + expert.to(tl.int64) * TOKENS + line, mask=line < count, other=0)
            rows = x + (pick // PICKS).to(tl.int64)[None, :] * X_STRIDE[0]
            column = program % column_tiles * TILE + tl.arange(0, TILE)
            inside = (column < INNER)[:, None]
            opened = weight_rows(gate_up, words, expert, column, 2 * INNER, WIDTH, GATE_STRIDE)
            beside = weight_rows(gate_up, words, expert, INNER + column, 2 * INNER, WIDTH, GATE_STRIDE)
            first = tl.zeros([TILE, LINES], tl.float32)
            second = tl.zeros([TILE, LINES], tl.float32)
            for begin in range(0, WIDTH, STEP):
                depth = begin + tl.arange(0, STEP)
                mask = (line < count)[None, :] & (depth < WIDTH)[:, None]
                row = tl.load(rows + depth[:, None] * X_STRIDE[1], mask=mask, other=0.0)
                gate = weight_tile(opened, words, begin, inside, WIDTH, GATE_STRIDE[2], STEP, row.dtype, INTERPRET)
                linear = weight_tile(beside, words, begin, inside, WIDTH, GATE_STRIDE[2], STEP, row.dtype, INTERPRET)
                first = multiplied(first, gate, row, INTERPRET)
                second = multiplied(second, linear, row, INTERPRET)
            share = tl.load(weight + pick, mask=line < count, other=0.0)
            hidden = gated(first, second, SITU, BETA, LINEAR_BETA, LIMIT, INTERPRET) * share[None, :]
            places = inner + pick.to(tl.int64)[None, :] * INNER + column[:, None]
            tl.store(places, narrow(hidden, inner, INTERPRET), mask=inside & (line < count)[None, :])


@triton.jit
def close_groups(inner, down, words, counts, members, outer, DOWN_STRIDE: tl.constexpr, TOKENS: tl.constexpr,
                 WIDTH: tl.constexpr, INNER: tl.constexpr, EXPERTS: tl.constexpr, EXPERT_BLOCK: tl.constexpr,
                 LINES: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr, INTERPRET: tl.constexpr):  # fmt: skip
    """``outer`` [tokens * picks, D] = what the expert of each pick makes of its row of ``inner``."""
    column_tiles: tl.constexpr = (WIDTH + TILE - 1) // TILE
    program = tl.program_id(0)
    expert, start, count = tile_of(counts, program // column_tiles, EXPERTS, EXPERT_BLOCK, LINES)
    if expert < EXPERTS:
        line = start + tl.arange(0, LINES)
        pick = tl.load(members + expert.to(tl.int64) * TOKENS + line, mask=line < count, other=0).to(tl.int64)
        column = program % column_tiles * TILE + tl.arange(0, TILE)
        inside = (column < WIDTH)[:, None]
        places = weight_rows(down, words, expert, column, WIDTH, INNER, DOWN_STRIDE)
        total = tl.zeros([TILE, LINES], tl.float32)
        for begin in range(0, INNER, STEP):
            depth = begin + tl.arange(0, STEP)
            mask = (line < count)[None, :] & (depth < INNER)[:, None]
            row = tl.load(inner + pick[None, :] * INNER + depth[:, None], mask=mask, other=0.0)
            weight = weight_tile(places, words, begin, inside, INNER, DOWN_STRIDE[2], STEP, row.dtype, INTERPRET)
            total = multiplied(total, weight, row, INTERPRET)
        mask = inside & (line < count)[None, :]
        tl.store(outer + pick[None, :] * WIDTH + column[:, None], narrow(total, outer, INTERPRET), mask=mask)


@triton.jit
def combine(outer, routed, TOKENS: tl.constexpr, WIDTH: tl.constexpr, PICKS: tl.constexpr, BLOCK: tl.constexpr,
            INTERPRET: tl.constexpr):  # fmt: skip
    """``routed`` [tokens, D] = the sum of a token's picks, in order."""
    element = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = element < TOKENS * WIDTH
    places = outer + element // WIDTH * (PICKS * WIDTH) + element % WIDTH
    total = tl.zeros([BLOCK], tl.float32)
    for number in tl.static_range(PICKS):
        total += tl.load(places + number * WIDTH, mask=mask, other=0.0).to(tl.float32)
    tl.store(routed + element, narrow(total, routed, INTERPRET), mask=mask)


def words_of(weight):
    """The bytes of MXFP4 four at a time; None for real numbers."""
    return weight.view(-1).view(torch.int32) if weight.dtype == torch.uint8 else None


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
    sizes, options, grids = CONSTANTS["sizes"], CONSTANTS["options"], CONSTANTS["grids"]
    same, integers = {"dtype": x.dtype, "device": x.device}, {"dtype": torch.int32, "device": x.device}
    chosen, members = memory.empty(sizes["chosen"], **integers), memory.empty(sizes["members"], **integers)
    counts = memory.zeros(sizes["counts"], **integers)
    weight = memory.empty(sizes["chosen"], dtype=torch.float32, device=x.device)
    inner, outer = memory.empty(sizes["inner"], **same), memory.empty(sizes["outer"], **same)
    shared = None if shared_down is None else memory.empty(sizes["shared"], **same)
    out = memory.empty(sizes["out"], **same)
    route_tokens[grids["route"]](
        logits, bias, chosen, weight, counts, members, **CONSTANTS["route_tokens"], **options["route"]
    )
    open_groups[grids["open"]](
        x, gate_up, words_of(gate_up), weight, counts, members, shared_gate, shared_up, inner, shared,
        **{**CONSTANTS["open_groups"], "INTERPRET": INTERPRET}, **options["open"],
    )  # fmt: skip
    close_groups[grids["close"]](
        inner, down, words_of(down), counts, members, outer,
        **{**CONSTANTS["close_groups"], "INTERPRET": INTERPRET}, **options["close"],
    )  # fmt: skip
    finishes = up is not None or shared is not None or residual is not None
    routed = memory.empty(sizes["routed"], dtype=torch.float32, device=x.device) if finishes else out
    combine[grids["combine"]](outer, routed, **{**CONSTANTS["combine"], "INTERPRET": INTERPRET}, **options["combine"])
    if finishes:
        finish_experts[grids["finish"]](
            routed, norm_weight, up, shared, shared_down, residual, out,
            **{**CONSTANTS["finish_experts"], "INTERPRET": INTERPRET}, **options["finish"],
        )  # fmt: skip
    return out, chosen
