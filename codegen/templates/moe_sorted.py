# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# Kernel text: inside @triton.jit, names are tensors of a language that type checkers do not know.
"""Routed experts of a long prompt on Hopper: rows are laid side by side by expert, so that tiles come by descriptors.

Rows of an expert have no order of their own: it decides where in a tile a row lies, never what comes out. The sum over
the picks of a token has one order.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from triton import knobs
from triton.tools.tensor_descriptor import TensorDescriptor

from kimigraph.codegen.templates.moe_activation import gated
from kimigraph.codegen.templates.moe_finish import activate_shared, finish_experts
from kimigraph.codegen.templates.moe_routing import choose
from kimigraph.codegen.templates.rounding import narrow, product

INTERPRET = knobs.runtime.interpret
CONSTANTS: dict[str, Any] = {}


@triton.jit
def route_tokens(logits, bias, chosen, weight, counts, slots, shared_gate, shared_up, shared,
                 LOGIT_STRIDE: tl.constexpr, BIAS_STRIDE: tl.constexpr, SHARED_STRIDE: tl.constexpr,
                 TOKENS: tl.constexpr, SHARED: tl.constexpr, GROUPS: tl.constexpr, MEMBERS: tl.constexpr,
                 GROUP_PICKS: tl.constexpr, PICKS: tl.constexpr, RENORMALIZE: tl.constexpr, SCALE: tl.constexpr,
                 GROUP_BLOCK: tl.constexpr, MEMBER_BLOCK: tl.constexpr, PICK_BLOCK: tl.constexpr, SITU: tl.constexpr,
                 BETA: tl.constexpr, LINEAR_BETA: tl.constexpr, LIMIT: tl.constexpr, BLOCK: tl.constexpr,
                 INTERPRET: tl.constexpr):  # fmt: skip
    """The experts of one token, their weights, and each pick's number among those of its expert.

    Programs behind the last token activate the shared experts.
    """
    token = tl.program_id(0)
    if token >= TOKENS:
        activate_shared(shared_gate, shared_up, shared, token - TOKENS, TOKENS, SHARED, SHARED_STRIDE, SITU, BETA,
                        LINEAR_BETA, LIMIT, BLOCK, INTERPRET)  # fmt: skip
    else:
        place = tl.arange(0, PICK_BLOCK)
        expert, share = choose(logits, bias, token, place, LOGIT_STRIDE, BIAS_STRIDE, GROUPS, MEMBERS, GROUP_PICKS,
                               PICKS, RENORMALIZE, SCALE, GROUP_BLOCK, MEMBER_BLOCK)  # fmt: skip
        mask = place < PICKS
        pick = token * PICKS + place
        tl.store(chosen + pick, expert, mask=mask)
        tl.store(weight + pick, share, mask=mask)
        tl.store(slots + pick, tl.atomic_add(counts + expert, 1, mask=mask, sem="relaxed"), mask=mask)


@triton.jit
def list_tiles(counts, tiles, EXPERTS: tl.constexpr, EXPERT_BLOCK: tl.constexpr, ROW_TILES: tl.constexpr,
               LINES: tl.constexpr):  # fmt: skip
    """``tiles`` [ROW_TILES, 4]: expert, first row and rows of each tile of LINES rows; -1 behind the last."""
    expert = tl.arange(0, EXPERT_BLOCK)
    count = tl.load(counts + expert, mask=expert < EXPERTS, other=0)
    first = tl.cumsum(count, 0) - count
    each = (count + LINES - 1) // LINES
    ends = tl.cumsum(each, 0)
    for number in range(tl.max(each, 0)):
        place, mask = tiles + (ends - each + number) * 4, number < each
        tl.store(place, expert, mask=mask)
        tl.store(place + 1, first + number * LINES, mask=mask)
        tl.store(place + 2, count - number * LINES, mask=mask)
    for start in range(tl.max(ends, 0), ROW_TILES, EXPERT_BLOCK):
        tl.store(tiles + (start + expert) * 4, expert * 0 - 1, mask=start + expert < ROW_TILES)


@triton.jit
def lay_rows(x, chosen, weight, counts, slots, rows, shares, places, tiles, X_STRIDE: tl.constexpr,
             TOKENS: tl.constexpr, WIDTH: tl.constexpr, PICKS: tl.constexpr, PICK_BLOCK: tl.constexpr,
             EXPERTS: tl.constexpr, EXPERT_BLOCK: tl.constexpr, ROW_TILES: tl.constexpr, LINES: tl.constexpr,
             BLOCK: tl.constexpr):  # fmt: skip
    """``rows`` [picks, D], ``shares``: a token's row and weight at each of its picks' places; then the tiles."""
    token = tl.program_id(0)
    if token == TOKENS:
        list_tiles(counts, tiles, EXPERTS, EXPERT_BLOCK, ROW_TILES, LINES)
    else:
        number = tl.arange(0, PICK_BLOCK)
        pick, mask = token * PICKS + number, number < PICKS
        mine = tl.load(chosen + pick, mask=mask, other=0)
        expert = tl.arange(0, EXPERT_BLOCK)
        count = tl.load(counts + expert, mask=expert < EXPERTS, other=0)
        before = tl.sum(tl.where(expert[None, :] < mine[:, None], count[None, :], 0), 1)
        place = before + tl.load(slots + pick, mask=mask, other=0)
        tl.store(places + pick, place, mask=mask)
        tl.store(shares + place, tl.load(weight + pick, mask=mask, other=0.0), mask=mask)
        target = rows + place.to(tl.int64)[:, None] * WIDTH
        for start in range(0, WIDTH, BLOCK):
            column = start + tl.arange(0, BLOCK)
            inside = column < WIDTH
            row = tl.load(x + token.to(tl.int64) * X_STRIDE[0] + column * X_STRIDE[1], mask=inside, other=0.0)
            row = tl.broadcast_to(row[None, :], (PICK_BLOCK, BLOCK))
            tl.store(target + column[None, :], row, mask=mask[:, None] & inside[None, :])


@triton.jit
def place_of(program, ROW_TILES: tl.constexpr, COLUMN_TILES: tl.constexpr, GROUP: tl.constexpr):
    """A program's tile of rows and of columns: GROUP neighbours take the same columns, so that they share them."""
    group, number = program // (GROUP * COLUMN_TILES), program % (GROUP * COLUMN_TILES)
    size = tl.minimum(ROW_TILES - group * GROUP, GROUP)
    return group * GROUP + number % size, number // size


@triton.jit
def plus(total, left, right, INTERPRET: tl.constexpr):
    """``total`` plus ``left @ right``."""
    if INTERPRET:
        total += product(left, right, left.dtype, INTERPRET)
    else:
        total = tl.dot(left, right, total)
    return total


@triton.jit
def open_tile(rows, gate_up, shares, inner, expert, first, count, column_tile, WIDTH: tl.constexpr,
              INNER: tl.constexpr, SITU: tl.constexpr, BETA: tl.constexpr, LINEAR_BETA: tl.constexpr,
              LIMIT: tl.constexpr, LINES: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr,
              INTERPRET: tl.constexpr):  # fmt: skip
    """LINES rows and TILE columns of ``inner``: gate and linear side by side are one product."""
    both = tl.zeros([LINES, 2 * TILE], tl.float32)
    for depth in range(0, WIDTH, STEP):
        weight = gate_up.load([expert * 2, column_tile * TILE, depth]).reshape(2 * TILE, STEP)
        both = plus(both, rows.load([first, depth]), weight.T, INTERPRET)
    gate, linear = tl.split(tl.permute(tl.reshape(both, (LINES, 2, TILE)), (0, 2, 1)))
    line = tl.arange(0, LINES)
    column = column_tile * TILE + tl.arange(0, TILE)
    share = tl.load(shares + first + line, mask=line < count, other=0.0)
    hidden = gated(gate, linear, SITU, BETA, LINEAR_BETA, LIMIT, INTERPRET) * share[:, None]
    place = inner + (first + line).to(tl.int64)[:, None] * INNER + column[None, :]
    tl.store(place, narrow(hidden, inner, INTERPRET), mask=(line < count)[:, None] & (column < INNER)[None, :])


@triton.jit
def open_rows(rows, half_rows, gate_up, shares, tiles, inner, WIDTH: tl.constexpr, INNER: tl.constexpr,
              ROW_TILES: tl.constexpr, SITU: tl.constexpr, BETA: tl.constexpr, LINEAR_BETA: tl.constexpr,
              LIMIT: tl.constexpr, LINES: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr, GROUP: tl.constexpr,
              INTERPRET: tl.constexpr):  # fmt: skip
    """``inner`` [picks, I]. A tile that is no more than half full takes half the lines; behind the last one is none."""
    row_tile, column_tile = place_of(tl.program_id(0), ROW_TILES, (INNER + TILE - 1) // TILE, GROUP)
    expert = tl.load(tiles + row_tile * 4)
    if expert >= 0:
        first, count = tl.load(tiles + row_tile * 4 + 1), tl.load(tiles + row_tile * 4 + 2)
        if count > LINES // 2:
            open_tile(rows, gate_up, shares, inner, expert, first, count, column_tile, WIDTH, INNER, SITU, BETA,
                      LINEAR_BETA, LIMIT, LINES, TILE, STEP, INTERPRET)  # fmt: skip
        else:
            open_tile(half_rows, gate_up, shares, inner, expert, first, count, column_tile, WIDTH, INNER, SITU, BETA,
                      LINEAR_BETA, LIMIT, LINES // 2, TILE, STEP, INTERPRET)  # fmt: skip


@triton.jit
def close_tile(inner, down, outer, expert, first, count, column_tile, WIDTH: tl.constexpr, INNER: tl.constexpr,
               LINES: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr, INTERPRET: tl.constexpr):  # fmt: skip
    """LINES rows and TILE columns of ``outer``."""
    total = tl.zeros([LINES, TILE], tl.float32)
    for depth in range(0, INNER, STEP):
        weight = down.load([expert * WIDTH + column_tile * TILE, depth])
        total = plus(total, inner.load([first, depth]), weight.T, INTERPRET)
    line = tl.arange(0, LINES)
    column = column_tile * TILE + tl.arange(0, TILE)
    place = outer + (first + line).to(tl.int64)[:, None] * WIDTH + column[None, :]
    tl.store(place, narrow(total, outer, INTERPRET), mask=(line < count)[:, None] & (column < WIDTH)[None, :])


@triton.jit
def close_rows(inner, half_inner, down, tiles, outer, WIDTH: tl.constexpr, INNER: tl.constexpr,
               ROW_TILES: tl.constexpr, LINES: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr,
               GROUP: tl.constexpr, INTERPRET: tl.constexpr):  # fmt: skip
    """``outer`` [picks, D] = what the expert of each row makes of its row of ``inner``."""
    row_tile, column_tile = place_of(tl.program_id(0), ROW_TILES, (WIDTH + TILE - 1) // TILE, GROUP)
    expert = tl.load(tiles + row_tile * 4)
    if expert >= 0:
        first, count = tl.load(tiles + row_tile * 4 + 1), tl.load(tiles + row_tile * 4 + 2)
        if count > LINES // 2:
            close_tile(inner, down, outer, expert, first, count, column_tile, WIDTH, INNER, LINES, TILE, STEP,
                       INTERPRET)  # fmt: skip
        else:
            close_tile(half_inner, down, outer, expert, first, count, column_tile, WIDTH, INNER, LINES // 2, TILE,
                       STEP, INTERPRET)  # fmt: skip


@triton.jit
def add_picks(outer, places, routed, WIDTH: tl.constexpr, PICKS: tl.constexpr, BLOCK: tl.constexpr,
              INTERPRET: tl.constexpr):  # fmt: skip
    """``routed`` [tokens, D] = the sum of a token's picks, in order."""
    token = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for number in tl.static_range(PICKS):
        place = tl.load(places + token * PICKS + number).to(tl.int64)
        total += tl.load(outer + place * WIDTH + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    tl.store(routed + token.to(tl.int64) * WIDTH + column, narrow(total, routed, INTERPRET), mask=column < WIDTH)


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
    sizes, options, grids, tile = (CONSTANTS[name] for name in ("sizes", "options", "grids", "tile"))
    same, integers = {"dtype": x.dtype, "device": x.device}, {"dtype": torch.int32, "device": x.device}
    fp32 = {"dtype": torch.float32, "device": x.device}
    chosen, slots, places = (memory.empty(sizes["chosen"], **integers) for _ in range(3))
    counts, tiles = memory.zeros(sizes["counts"], **integers), memory.empty(sizes["tiles"], **integers)
    weight, shares = memory.empty(sizes["chosen"], **fp32), memory.empty(sizes["shares"], **fp32)
    rows, inner, outer = (memory.empty(sizes[name], **same) for name in ("outer", "inner", "outer"))
    shared = None if shared_down is None else memory.empty(sizes["shared"], **same)
    out = memory.empty(sizes["out"], **same)
    route_tokens[grids["route"]](
        logits, bias, chosen, weight, counts, slots, shared_gate, shared_up, shared,
        **{**CONSTANTS["route_tokens"], "INTERPRET": INTERPRET}, **options["route"],
    )  # fmt: skip
    lay_rows[grids["lay"]](
        x, chosen, weight, counts, slots, rows, shares, places, tiles, **CONSTANTS["lay_rows"], **options["lay"]
    )
    halves, weights = gate_up.view(-1, gate_up.shape[1] // 2, gate_up.shape[2]), down.view(-1, down.shape[2])
    open_rows[grids["open"]](
        *(TensorDescriptor.from_tensor(rows, tile[name]) for name in ("rows", "half_rows")),
        TensorDescriptor.from_tensor(halves, tile["gate_up"]), shares, tiles, inner,
        **{**CONSTANTS["open_rows"], "INTERPRET": INTERPRET}, **options["open"],
    )  # fmt: skip
    close_rows[grids["close"]](
        *(TensorDescriptor.from_tensor(inner, tile[name]) for name in ("inner", "half_inner")),
        TensorDescriptor.from_tensor(weights, tile["down"]), tiles, outer,
        **{**CONSTANTS["close_rows"], "INTERPRET": INTERPRET}, **options["close"],
    )  # fmt: skip
    finishes = up is not None or shared is not None or residual is not None
    routed = memory.empty(sizes["routed"], **fp32) if finishes else out
    add_picks[grids["add"]](
        outer, places, routed, **{**CONSTANTS["add_picks"], "INTERPRET": INTERPRET}, **options["add"]
    )
    if finishes:
        finish_experts[grids["finish"]](
            routed, norm_weight, up, shared, shared_down, residual, out,
            **{**CONSTANTS["finish_experts"], "INTERPRET": INTERPRET}, **options["finish"],
        )  # fmt: skip
    return out, chosen
