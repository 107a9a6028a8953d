# pyright: basic, reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false
# Kernel text: inside @gluon.jit, names are tensors and constants of a language whose types say little to a checker.
"""Routed experts of one token in one launch on Hopper: a warp brings all weights through a ring that never runs dry.

A program takes tiles of the gate and linear products of one pick, then rows of the product that closes the experts.
Weights of the first come as soon as that pick is known, while the same warp goes on to choose the others; those of the
second come while programs still wait for one another between the two, so that the memory never rests. All programs
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
from kimigraph.codegen.templates.moe_choice_gluon import at_place, best_experts, expert_of_rank, ranked_experts
from kimigraph.codegen.templates.moe_finish import finish_experts

CONSTANTS: dict[str, Any] = {}


@gluon.jit
def bring_open(gate_up, ring, full, free, expert, program, first, last, INNER: gl.constexpr, STEPS: gl.constexpr,
               PICKS: gl.constexpr, PROGRAMS: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """Units ``first`` to ``last`` of the gate and linear products, of which a tile takes STEPS."""
    for unit in range(first, last):
        slot = unit % STAGES
        mbarrier.wait(free.index(slot), (unit // STAGES & 1) ^ 1)
        arrived, places = full.index(slot), ring.index(slot)
        mbarrier.expect(arrived, 16384)
        row = expert * (2 * INNER) + (program + unit // STEPS * PROGRAMS) // PICKS * 64
        depth = unit % STEPS * 64
        tma.async_copy_global_to_shared(gate_up, [row, depth], arrived, places.slice(0, 64))
        tma.async_copy_global_to_shared(gate_up, [row + INNER, depth], arrived, places.slice(64, 64))


@gluon.jit
def bring_weights(logits, bias, gate_up, down, chosen, share, told, ring, full, free, program,
                  LOGIT_STRIDE: gl.constexpr, BIAS_STRIDE: gl.constexpr, WIDTH: gl.constexpr, INNER: gl.constexpr,
                  EXPERTS: gl.constexpr, PICKS: gl.constexpr, RENORMALIZE: gl.constexpr, SCALE: gl.constexpr,
                  EACH: gl.constexpr, PROGRAMS: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """Choose, and fill the slots of the ring in turn, as they fall free, with all weights of this program: one warp.

    ``share`` gets what the program's pick counts in the sum; ``told`` says that it is there.
    """
    STEPS: gl.constexpr = WIDTH // 64
    OPEN: gl.constexpr = PICKS * INNER // (64 * PROGRAMS) * STEPS
    PARTS: gl.constexpr = PICKS * INNER // 8192
    BOXES: gl.constexpr = INNER // 1024
    EARLY: gl.constexpr = STAGES if STAGES < OPEN else OPEN
    WARP: gl.constexpr = gl.BlockedLayout([2], [32], [1], [0])
    expert, score, key = ranked_experts(logits, bias, LOGIT_STRIDE, BIAS_STRIDE, EXPERTS, EACH)
    own = expert_of_rank(expert, key, program % PICKS, EACH)
    bring_open(gate_up, ring, full, free, own, program, 0, EARLY, INNER, STEPS, PICKS, PROGRAMS, STAGES)
    experts, total = best_experts(expert, score, key, EXPERTS, PICKS, EACH)
    part = SCALE * gl.max(gl.where(expert == own, score, 0.0), 0)
    if RENORMALIZE:
        part = part / (total + 1e-20)
    share.store(gl.zeros([64], gl.float32, layout=WARP) + part)
    mbarrier.arrive(told, count=1)
    if program == 0:
        for number in gl.static_range(PICKS):
            gl.store(chosen + number, experts[number])
    bring_open(gate_up, ring, full, free, own, program, EARLY, OPEN, INNER, STEPS, PICKS, PROGRAMS, STAGES)
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
def sums_of_threads(values):
    """[128, 64] -> a sum for each thread, of what it holds: no thread waits for another."""
    LINES: gl.constexpr = 4 * gl.num_warps()
    held = gl.sum(gl.reshape(values, [128 // LINES, LINES, 64]), 0)
    return gl.reshape(gl.sum(gl.reshape(held, [LINES, 8, 8]), 2), [8 * LINES])


@gluon.jit
def activate_shared_experts(gate, linear, out, program, STRIDE: gl.constexpr, SHARED: gl.constexpr, SITU: gl.constexpr,
                            BETA: gl.constexpr, LINEAR_BETA: gl.constexpr, LIMIT: gl.constexpr):  # fmt: skip
    """``out`` [J] = act(gate, linear), an element a thread."""
    THREADS: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    element = program * (32 * gl.num_warps()) + gl.arange(0, 32 * gl.num_warps(), layout=THREADS)
    inside = element < SHARED
    opened = gl.load(gate + element * STRIDE[1], mask=inside, other=0.0, cache_modifier=".cg").to(gl.float32)
    second = gl.load(linear + element * STRIDE[3], mask=inside, other=0.0, cache_modifier=".cg").to(gl.float32)
    hidden = gated(opened, second, SITU, BETA, LINEAR_BETA, LIMIT, False)
    gl.store(out + element, hidden.to(out.dtype.element_ty), mask=inside)


@gluon.jit
def multiply_weights(x, shared_gate, shared_up, shared, inner, routed, arrivals, row_of_x, sums, share, told,
                     ring, full, free, program,
                     X_STRIDE: gl.constexpr, SHARED_STRIDE: gl.constexpr, SHARED: gl.constexpr, WIDTH: gl.constexpr,
                     INNER: gl.constexpr, PICKS: gl.constexpr, SITU: gl.constexpr, BETA: gl.constexpr,
                     LINEAR_BETA: gl.constexpr, LIMIT: gl.constexpr, PROGRAMS: gl.constexpr,
                     STAGES: gl.constexpr):  # fmt: skip
    """Both products of what the ring brings; programs meet between them. Sums of rows are added up last, at once."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    ROWS: gl.constexpr = gl.BlockedLayout([1, gl.num_warps()], [1, 32], [gl.num_warps(), 1], [1, 0])
    LINEAR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    STEPS: gl.constexpr = WIDTH // 64
    TILES: gl.constexpr = PICKS * INNER // (64 * PROGRAMS)
    PARTS: gl.constexpr = PICKS * INNER // 8192
    column = gl.arange(0, 64, layout=gl.SliceLayout(0, LAYOUT))
    depth = gl.expand_dims(gl.arange(0, row_of_x.shape[0], layout=gl.SliceLayout(1, LAYOUT)) * 64, 1)
    depth = depth + gl.expand_dims(column, 0)
    flat = row_of_x._reinterpret(x.dtype.element_ty, [row_of_x.shape[0], 64], LINEAR)
    flat.store(gl.load(x + depth * X_STRIDE[1], mask=depth < WIDTH, other=0.0, cache_modifier=".cg"))
    if shared is not None:
        if program * (32 * gl.num_warps()) < SHARED:
            activate_shared_experts(shared_gate, shared_up, shared, program, SHARED_STRIDE, SHARED, SITU, BETA,
                                    LINEAR_BETA, LIMIT)  # fmt: skip
    unit = 0
    for number in range(TILES):
        tile = program + number * PROGRAMS
        total = gl.zeros([128, 64], gl.float32, layout=LAYOUT)
        for step in range(STEPS):
            values = row_of_x.index(step).load(gl.SliceLayout(0, LAYOUT)).to(gl.float32)
            total += taken(ring, full, free, unit, LAYOUT, STAGES) * gl.expand_dims(values, 0)
            unit += 1
        pairs = gl.permute(gl.reshape(gl.sum(total, 1), [2, 64]), [1, 0])
        PAIRS: gl.constexpr = gl.BlockedLayout([1, 2], [32, 1], [gl.num_warps(), 1], [1, 0])
        gate, linear = gl.split(gl.convert_layout(pairs, PAIRS))
        mbarrier.wait(told, 0)
        hidden = gated(gate, linear, SITU, BETA, LINEAR_BETA, LIMIT, False)
        hidden = hidden * share.load(hidden.type.layout)
        place = tile // PICKS * 64 + gl.arange(0, 64, layout=hidden.type.layout)
        gl.store(inner + tile % PICKS * INNER + place, hidden.to(inner.dtype.element_ty))
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
        sums.index(row).store(sums_of_threads(result))
    tl.debug_barrier()
    whole = sums._reinterpret(gl.float32, [sums.shape[0], sums.shape[1]], LINEAR).load(ROWS)
    row = gl.arange(0, sums.shape[0], layout=gl.SliceLayout(1, ROWS))
    value = gl.sum(whole, 1).to(routed.dtype.element_ty)
    gl.store(routed + program + row * PROGRAMS, value, mask=row < WIDTH // PROGRAMS)


@gluon.jit
def stream_experts(gate_up, down, x, logits, bias, shared_gate, shared_up, shared, inner, chosen, routed, arrivals,
                   X_STRIDE: gl.constexpr, LOGIT_STRIDE: gl.constexpr, BIAS_STRIDE: gl.constexpr,
                   SHARED_STRIDE: gl.constexpr, SHARED: gl.constexpr, WIDTH: gl.constexpr, INNER: gl.constexpr,
                   EXPERTS: gl.constexpr, PICKS: gl.constexpr,
                   RENORMALIZE: gl.constexpr, SCALE: gl.constexpr, EACH: gl.constexpr, SITU: gl.constexpr,
                   BETA: gl.constexpr, LINEAR_BETA: gl.constexpr, LIMIT: gl.constexpr, PROGRAMS: gl.constexpr,
                   STAGES: gl.constexpr, DEPTHS: gl.constexpr, ROWS: gl.constexpr,
                   REGISTERS: gl.constexpr):  # fmt: skip
    """``routed`` [D] = the weighted sum over the experts that the token chose; ``inner`` is scratch of all programs.

    The shared experts, where there are any, are activated on the way.
    """
    program = gl.program_id(0)
    TILE: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    ring = gl.allocate_shared_memory(gate_up.dtype, [STAGES, 128, 64], TILE)
    row_of_x = gl.allocate_shared_memory(x.dtype.element_ty, [DEPTHS, 64], PLAIN)
    sums = gl.allocate_shared_memory(gl.float32, [ROWS, 32 * gl.num_warps()], PLAIN)
    share = gl.allocate_shared_memory(gl.float32, [64], PLAIN)
    told = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(told, count=1)
    for slot in gl.static_range(STAGES):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(free.index(slot), count=1)
    let_next_launch_start()
    wait_for_earlier_launch()
    gl.warp_specialize(
        [
            (multiply_weights, (x, shared_gate, shared_up, shared, inner, routed, arrivals, row_of_x, sums, share, told,
                                ring, full, free, program, X_STRIDE, SHARED_STRIDE, SHARED, WIDTH, INNER, PICKS, SITU,
                                BETA, LINEAR_BETA, LIMIT, PROGRAMS, STAGES)),
            (bring_weights, (logits, bias, gate_up, down, chosen, share, told, ring, full, free, program, LOGIT_STRIDE,
                             BIAS_STRIDE, WIDTH, INNER, EXPERTS, PICKS, RENORMALIZE, SCALE, EACH, PROGRAMS, STAGES)),
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
    sizes, constants = CONSTANTS["sizes"], CONSTANTS["stream_experts"]
    same = {"dtype": x.dtype, "device": x.device}
    inner = memory.empty(sizes["inner"], **same)
    chosen = memory.empty(sizes["chosen"], dtype=torch.int32, device=x.device)
    shared = None if shared_down is None else memory.empty(sizes["shared"], **same)
    out = memory.empty(sizes["out"], **same)
    finishes = up is not None or shared is not None or residual is not None
    routed = memory.empty(sizes["routed"], dtype=torch.float32, device=x.device) if finishes else out
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    rows, pieces = gate_up.view(-1, gate_up.shape[2]), down.view(-1, 64)
    stream_experts[(constants["PROGRAMS"],)](
        TensorDescriptor(rows, list(rows.shape), [rows.shape[1], 1], [64, 64], layout),
        TensorDescriptor(pieces, list(pieces.shape), [64, 1], [16, 64], layout),
        x, logits, bias, shared_gate, shared_up, shared, inner, chosen, routed,
        row_state(states(x.device), 1, x.device), **constants, **CONSTANTS["options"]["stream"],
    )  # fmt: skip
    if finishes:
        finish_experts[CONSTANTS["grid"]](
            routed, norm_weight, up, shared, shared_down, residual, out,
            **{**CONSTANTS["finish_experts"], "INTERPRET": False}, **CONSTANTS["options"]["finish"],
        )  # fmt: skip
    return out, chosen
