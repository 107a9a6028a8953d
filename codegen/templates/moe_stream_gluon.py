# pyright: basic, reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false
# Kernel text: inside @gluon.jit, names are tensors and constants of a language whose types say little to a checker.
"""Routed experts of one token in one launch on Hopper: a warp brings all weights through a ring that never runs dry.

A program takes tiles of the gate and linear products, then rows of the product that closes the experts. Weights of the
second come while programs still wait for one another between the two, so that the memory never rests; all programs
must run at once, hence the cooperative launch. Every sum has one order.
"""

from functools import cache
from typing import Any

import torch
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kimigraph.codegen.templates.launch_order import let_next_launch_start, wait_for_earlier_launch
from kimigraph.codegen.templates.meeting import meet, row_state
from kimigraph.codegen.templates.moe_activation import gated

CONSTANTS: dict[str, Any] = {}
NOTHING = gl.constexpr(-0x80000000)


@gluon.jit
def best_experts(logits, bias, LOGIT_STRIDE: gl.constexpr, BIAS_STRIDE: gl.constexpr, EXPERTS: gl.constexpr,
                 PICKS: gl.constexpr, EACH: gl.constexpr):  # fmt: skip
    """The experts of the largest score and bias, the best first, and the sum of their scores.

    Every warp holds all experts, ``EACH`` a lane, so that no warp waits for another: a maximum is one instruction.
    """
    LANES: gl.constexpr = gl.BlockedLayout([EACH], [32], [gl.num_warps()], [0])
    expert = gl.arange(0, 32 * EACH, layout=LANES)
    inside = expert < EXPERTS
    logit = gl.load(logits + expert * LOGIT_STRIDE[1], mask=inside, other=0.0, cache_modifier=".cg")
    score = 1.0 / (1.0 + gl.exp(-logit.to(gl.float32)))
    choice = score
    if bias is not None:
        choice += gl.load(bias + expert * BIAS_STRIDE, mask=inside, other=0.0, cache_modifier=".cg").to(gl.float32)
    # Order of fp32 as that of int32: NaN ranks as -inf, both zeros are one.
    choice = gl.where(choice != choice, float("-inf"), gl.where(choice == 0.0, 0.0, choice))
    bits = choice.to(gl.int32, bitcast=True)
    key = gl.where(inside, gl.where(bits < 0, bits ^ 0x7FFFFFFF, bits), NOTHING)
    chosen = ()
    for _ in gl.static_range(PICKS):
        best = gl.max(key, 0)
        place = gl.min(gl.where(key == best, expert, 32 * EACH), 0)
        key = gl.where(expert == place, NOTHING, key)
        chosen = chosen + (place,)
    total = gl.sum(gl.where((key == NOTHING) & inside, score, 0.0), 0)
    return chosen, total


@gluon.jit
def at_place(values, place):
    """The ``place``-th of a tuple of scalars; ``place`` may be a tensor."""
    value = values[0] + place * 0
    for number in gl.static_range(1, len(values)):
        value = gl.where(place == number, values[number], value)
    return value


@gluon.jit
def bring_weights(logits, bias, gate_up, down, ring, full, free, program, LOGIT_STRIDE: gl.constexpr,
                  BIAS_STRIDE: gl.constexpr, WIDTH: gl.constexpr, INNER: gl.constexpr, EXPERTS: gl.constexpr,
                  PICKS: gl.constexpr, EACH: gl.constexpr, PROGRAMS: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """Fill the slots of the ring in turn, as they fall free, with all weights of this program: one warp does it."""
    STEPS: gl.constexpr = WIDTH // 64
    OPEN: gl.constexpr = PICKS * INNER // (64 * PROGRAMS) * STEPS
    PARTS: gl.constexpr = PICKS * INNER // 8192
    BOXES: gl.constexpr = INNER // 1024
    experts, _ = best_experts(logits, bias, LOGIT_STRIDE, BIAS_STRIDE, EXPERTS, PICKS, EACH)
    for unit in range(OPEN):
        slot = unit % STAGES
        mbarrier.wait(free.index(slot), (unit // STAGES & 1) ^ 1)
        arrived, places = full.index(slot), ring.index(slot)
        mbarrier.expect(arrived, 16384)
        tile = program + unit // STEPS * PROGRAMS
        row = at_place(experts, tile % PICKS) * (2 * INNER) + tile // PICKS * 64
        depth = unit % STEPS * 64
        tma.async_copy_global_to_shared(gate_up, [row, depth], arrived, places.slice(0, 64))
        tma.async_copy_global_to_shared(gate_up, [row + INNER, depth], arrived, places.slice(64, 64))
    for number in range(WIDTH // PROGRAMS * PARTS):
        unit = OPEN + number
        slot = unit % STAGES
        mbarrier.wait(free.index(slot), (unit // STAGES & 1) ^ 1)
        arrived, places = full.index(slot), ring.index(slot)
        mbarrier.expect(arrived, 16384)
        line = program + number // PARTS * PROGRAMS
        for box in gl.static_range(8):
            place = number % PARTS * 8 + box
            row = (at_place(experts, place // BOXES) * WIDTH + line) * (INNER // 64) + place % BOXES * 16
            tma.async_copy_global_to_shared(down, [row, 0], arrived, places.slice(box * 16, 16))


@gluon.jit
def taken(ring, full, free, unit, LAYOUT: gl.constexpr, STAGES: gl.constexpr):
    """The next slot [128, 64] in fp32, once it has arrived; then it is free again."""
    slot = unit % STAGES
    mbarrier.wait(full.index(slot), unit // STAGES & 1)
    values = ring.index(slot).load(LAYOUT)
    tl.debug_barrier()
    mbarrier.arrive(free.index(slot), count=1)
    return values.to(gl.float32)


@gluon.jit
def hidden_tile(inner, part, LAYOUT: gl.constexpr):
    """What the first products made of the columns of a slot, past the L1 cache: other programs wrote it."""
    line = gl.expand_dims(gl.arange(0, 128, layout=gl.SliceLayout(1, LAYOUT)), 1)
    column = gl.expand_dims(gl.arange(0, 64, layout=gl.SliceLayout(0, LAYOUT)), 0)
    return gl.load(inner + part * 8192 + (line * 64 + column), cache_modifier=".cg").to(gl.float32)


@gluon.jit
def multiply_weights(x, logits, bias, inner, chosen, routed, arrivals, row_of_x, ring, full, free, program,
                     X_STRIDE: gl.constexpr, LOGIT_STRIDE: gl.constexpr, BIAS_STRIDE: gl.constexpr,
                     WIDTH: gl.constexpr, INNER: gl.constexpr, EXPERTS: gl.constexpr, PICKS: gl.constexpr,
                     RENORMALIZE: gl.constexpr, SCALE: gl.constexpr, EACH: gl.constexpr, SITU: gl.constexpr,
                     BETA: gl.constexpr, LINEAR_BETA: gl.constexpr, LIMIT: gl.constexpr, PROGRAMS: gl.constexpr,
                     STAGES: gl.constexpr):  # fmt: skip
    """Both products of what the ring brings; programs meet between them."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    STEPS: gl.constexpr = WIDTH // 64
    TILES: gl.constexpr = PICKS * INNER // (64 * PROGRAMS)
    PARTS: gl.constexpr = PICKS * INNER // 8192
    column = gl.arange(0, 64, layout=gl.SliceLayout(0, LAYOUT))
    depth = gl.expand_dims(gl.arange(0, row_of_x.shape[0], layout=gl.SliceLayout(1, LAYOUT)) * 64, 1)
    depth = depth + gl.expand_dims(column, 0)
    flat = row_of_x._reinterpret(x.dtype.element_ty, [row_of_x.shape[0], 64], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    flat.store(gl.load(x + depth * X_STRIDE[1], mask=depth < WIDTH, other=0.0, cache_modifier=".cg"))
    experts, total = best_experts(logits, bias, LOGIT_STRIDE, BIAS_STRIDE, EXPERTS, PICKS, EACH)
    if program == 0:
        for number in gl.static_range(PICKS):
            gl.store(chosen + number, experts[number])
    unit = 0
    for number in range(TILES):
        tile = program + number * PROGRAMS
        pick = tile % PICKS
        score = gl.load(logits + at_place(experts, pick) * LOGIT_STRIDE[1], cache_modifier=".cg").to(gl.float32)
        weight = SCALE / (1.0 + gl.exp(-score))
        if RENORMALIZE:
            weight = weight / (total + 1e-20)
        sums = gl.zeros([128, 64], gl.float32, layout=LAYOUT)
        for step in range(STEPS):
            values = row_of_x.index(step).load(gl.SliceLayout(0, LAYOUT)).to(gl.float32)
            sums += taken(ring, full, free, unit, LAYOUT, STAGES) * gl.expand_dims(values, 0)
            unit += 1
        pairs = gl.permute(gl.reshape(gl.sum(sums, 1), [2, 64]), [1, 0])
        gate, linear = gl.split(pairs)
        hidden = gated(gate, linear, SITU, BETA, LINEAR_BETA, LIMIT, False) * weight
        place = tile // PICKS * 64 + gl.arange(0, 64, layout=hidden.type.layout)
        gl.store(inner + pick * INNER + place, hidden.to(inner.dtype.element_ty))
    meet(arrivals, PROGRAMS)
    if PARTS == 1:
        hidden_values = hidden_tile(inner, 0, LAYOUT)
    for row in range(WIDTH // PROGRAMS):
        result = gl.zeros([128, 64], gl.float32, layout=LAYOUT)
        for part in range(PARTS):
            if PARTS > 1:
                hidden_values = hidden_tile(inner, part, LAYOUT)
            result += taken(ring, full, free, unit, LAYOUT, STAGES) * hidden_values
            unit += 1
        value = gl.sum(gl.sum(result, 1), 0)
        gl.store(routed + program + row * PROGRAMS, value.to(routed.dtype.element_ty))


@gluon.jit
def stream_experts(gate_up, down, x, logits, bias, inner, chosen, routed, arrivals,
                   X_STRIDE: gl.constexpr, LOGIT_STRIDE: gl.constexpr, BIAS_STRIDE: gl.constexpr,
                   WIDTH: gl.constexpr, INNER: gl.constexpr, EXPERTS: gl.constexpr, PICKS: gl.constexpr,
                   RENORMALIZE: gl.constexpr, SCALE: gl.constexpr, EACH: gl.constexpr, SITU: gl.constexpr,
                   BETA: gl.constexpr, LINEAR_BETA: gl.constexpr, LIMIT: gl.constexpr, PROGRAMS: gl.constexpr,
                   STAGES: gl.constexpr, DEPTHS: gl.constexpr, REGISTERS: gl.constexpr):  # fmt: skip
    """``routed`` [D] = the weighted sum over the experts that the token chose; ``inner`` is scratch of all programs."""
    program = gl.program_id(0)
    TILE: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    ring = gl.allocate_shared_memory(gate_up.dtype, [STAGES, 128, 64], TILE)
    row_of_x = gl.allocate_shared_memory(x.dtype.element_ty, [DEPTHS, 64], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(free.index(slot), count=1)
    let_next_launch_start()
    wait_for_earlier_launch()
    gl.warp_specialize(
        [
            (multiply_weights, (x, logits, bias, inner, chosen, routed, arrivals, row_of_x, ring, full, free, program,
                                X_STRIDE, LOGIT_STRIDE, BIAS_STRIDE, WIDTH, INNER, EXPERTS, PICKS, RENORMALIZE, SCALE,
                                EACH, SITU, BETA, LINEAR_BETA, LIMIT, PROGRAMS, STAGES)),
            (bring_weights, (logits, bias, gate_up, down, ring, full, free, program,
                             LOGIT_STRIDE, BIAS_STRIDE, WIDTH, INNER, EXPERTS, PICKS, EACH, PROGRAMS, STAGES)),
        ],
        [1],
        [REGISTERS],
    )  # fmt: skip


@cache
def states(device):
    """Counters of arrivals, by stream."""
    del device
    return {}


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
    del norm_weight, up, shared_gate, shared_up, shared_down, residual
    sizes, constants = CONSTANTS["sizes"], CONSTANTS["stream_experts"]
    same = {"dtype": x.dtype, "device": x.device}
    inner = memory.empty(sizes["inner"], **same)
    chosen = memory.empty(sizes["chosen"], dtype=torch.int32, device=x.device)
    out = memory.empty(sizes["out"], **same)
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    rows, pieces = gate_up.view(-1, gate_up.shape[2]), down.view(-1, 64)
    stream_experts[(constants["PROGRAMS"],)](
        TensorDescriptor(rows, list(rows.shape), [rows.shape[1], 1], [64, 64], layout),
        TensorDescriptor(pieces, list(pieces.shape), [64, 1], [16, 64], layout),
        x, logits, bias, inner, chosen, out,
        row_state(states(x.device), 1, x.device), **constants, **CONSTANTS["options"],
    )  # fmt: skip
    return out, chosen
