# pyright: basic, reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false
# Kernel text: inside @gluon.jit, names are tensors and constants of a language whose types say little to a checker.
"""One KDA step that leaves the state where it is until its log is full, for heads of 128 on NVIDIA GPUs.

The records of the tokens behind the state are folded into it in registers, in the order of decoding, on each step: that
needs no sum and takes less time than writing the state would.
"""

from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kimigraph.codegen.templates.kda_gate import log_decay, sigmoid
from kimigraph.codegen.templates.kda_sums import add_pairs, add_triples
from kimigraph.codegen.templates.launch_order import let_next_launch_start

CONSTANTS: dict[str, Any] = {}


@gluon.jit
def kda_logged_step(
    qkv,
    conv_weight,
    conv_state,
    gate,
    dt_bias,
    a_log,
    beta,
    state,
    keys,
    decays,
    deltas,
    filled,
    out_gate,
    norm_weight,
    out,
    L: gl.constexpr,
    PADDED: gl.constexpr,
    H: gl.constexpr,
    SCALE: gl.constexpr,
    L2_EPS: gl.constexpr,
    LOWER_BOUND: gl.constexpr,
    NORM_EPS: gl.constexpr,
    QKV_STRIDE: gl.constexpr,
    TAP_STRIDE: gl.constexpr,
    CONV_STRIDE: gl.constexpr,
    GATE_STRIDE: gl.constexpr,
    BIAS_STRIDE: gl.constexpr,
    RATE_STRIDE: gl.constexpr,
    BETA_STRIDE: gl.constexpr,
    STATE_STRIDE: gl.constexpr,
    OUT_GATE_STRIDE: gl.constexpr,
    NORM_STRIDE: gl.constexpr,
):
    """The token of one (sequence, head).

    Of ``filled`` < L records each is a product and a sum an element; the token becomes one more, or, as the L-th, all
    of them the state.
    """
    D: gl.constexpr = 128
    WARPS: gl.constexpr = gl.num_warps()
    # The layouts of the decode kernel: sums of the state then have its order.
    TILE: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [WARPS, 1], [1, 0])
    VALUES: gl.constexpr = gl.SliceLayout(1, TILE)
    KEYS: gl.constexpr = gl.SliceLayout(0, TILE)
    # [q, k, gate, v; channel]: two channels a thread.
    CHANNELS: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [4, WARPS // 4], [1, 0])
    RECORDS: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [WARPS, 1], [1, 0])
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    let_next_launch_start()
    program = gl.program_id(0)
    head = program % H
    sequence = (program // H).to(gl.int64)
    count = gl.load(filled + sequence).to(gl.int32)
    v = gl.arange(0, D, layout=VALUES)
    k = gl.arange(0, D, layout=KEYS)
    place = state + sequence * STATE_STRIDE[0] + head.to(gl.int64) * STATE_STRIDE[1]
    place = place + gl.expand_dims(v * STATE_STRIDE[2], 1) + gl.expand_dims(k, 0)
    memory = gl.load(place).to(gl.float32)

    row = gl.expand_dims(gl.arange(0, 4, layout=gl.SliceLayout(1, CHANNELS)), 1)
    at = gl.expand_dims(gl.arange(0, D, layout=gl.SliceLayout(0, CHANNELS)), 0)
    is_gate = (row == 2) & (at >= 0)
    mixes = (row != 2) & (at >= 0)
    channel = gl.where(row == 3, 2, row) * (H * D) + head * D + at
    conv_place = conv_state + sequence * CONV_STRIDE[0] + channel * CONV_STRIDE[1]
    oldest = gl.load(conv_place, mask=mixes, other=0.0)
    older = gl.load(conv_place + CONV_STRIDE[2], mask=mixes, other=0.0)
    old = gl.load(conv_place + 2 * CONV_STRIDE[2], mask=mixes, other=0.0)
    raw = gl.load(qkv + sequence * QKV_STRIDE[0] + channel * QKV_STRIDE[2], mask=mixes, other=0.0)
    taps = ()
    for tap in gl.static_range(4):
        tap_place = conv_weight + channel * TAP_STRIDE[0] + tap * TAP_STRIDE[1]
        taps = taps + (gl.load(tap_place, mask=mixes, other=0.0).to(gl.float32),)
    gate_place = gate + sequence * GATE_STRIDE[0] + head * GATE_STRIDE[2] + at * GATE_STRIDE[3] + row * 0
    logit = gl.load(gate_place, mask=is_gate, other=0.0).to(gl.float32)
    bias_place = dt_bias + head * BIAS_STRIDE[0] + at * BIAS_STRIDE[1] + row * 0
    bias = gl.load(bias_place, mask=is_gate, other=0.0).to(gl.float32)
    rate = gl.load(a_log + head * RATE_STRIDE).to(gl.float32)
    strength = gl.load(beta + sequence * BETA_STRIDE[0] + head * BETA_STRIDE[2]).to(gl.float32)

    first = sequence * (L * H) + head
    token = gl.expand_dims(gl.arange(0, PADDED, layout=gl.SliceLayout(1, RECORDS)), 1)
    of_record = gl.expand_dims(gl.arange(0, D, layout=gl.SliceLayout(0, RECORDS)), 0)
    record = (first + token * H) * D + of_record
    behind = (token < count) & (of_record >= 0)
    old_decays = gl.load(decays + record, mask=behind, other=0.0)
    old_keys = gl.load(keys + record, mask=behind, other=0.0)
    old_deltas = gl.load(deltas + record, mask=behind, other=0.0)
    if out_gate is not None:
        out_gate_place = out_gate + sequence * OUT_GATE_STRIDE[0] + head * OUT_GATE_STRIDE[2]
        opening = gl.load(out_gate_place + v * OUT_GATE_STRIDE[3])
    if norm_weight is not None:
        factors = gl.load(norm_weight + v * NORM_STRIDE)

    mixed = oldest.to(gl.float32) * taps[0] + older.to(gl.float32) * taps[1] + old.to(gl.float32) * taps[2]
    mixed = mixed + raw.to(gl.float32) * taps[3]
    if LOWER_BOUND is None:
        decay = gl.exp(log_decay(logit + bias, gl.exp(rate), None))
        value = gl.where(is_gate, decay, mixed * sigmoid(mixed))
    else:
        # Either row needs one sigmoid: of the mixed inputs for SiLU, of the scaled logit for the bounded gate.
        mixed = gl.where(is_gate, gl.exp(rate) * (logit + bias), mixed)
        share = sigmoid(mixed)
        value = gl.where(is_gate, gl.exp(LOWER_BOUND * share), mixed * share)
    # q, k, exp(g) and v of the token, and the records, pass from their own layout to that of the state.
    exchange = gl.allocate_shared_memory(gl.float32, [4, D], LINE)
    decay_rows = gl.allocate_shared_memory(gl.float32, [PADDED, D], LINE)
    key_rows = gl.allocate_shared_memory(gl.float32, [PADDED, D], LINE)
    delta_rows = gl.allocate_shared_memory(gl.float32, [PADDED, D], LINE)
    exchange.store(value)
    decay_rows.store(old_decays)
    key_rows.store(old_keys)
    delta_rows.store(old_deltas)
    flat = exchange._reinterpret(gl.float32, [4 * D], FLAT)
    flat_deltas = delta_rows._reinterpret(gl.float32, [PADDED * D], FLAT)
    # A thread writes the columns that it has read.
    gl.store(conv_place, older, mask=mixes)
    gl.store(conv_place + CONV_STRIDE[2], old, mask=mixes)
    gl.store(conv_place + 2 * CONV_STRIDE[2], raw.to(old.dtype), mask=mixes)
    logs = count + 1 < L
    own = (first + count * H) * D
    gl.store(keys + own + at + row * 0, value, mask=(row == 1) & (at >= 0) & logs)
    gl.store(decays + own + at + row * 0, value, mask=is_gate & logs)

    # Read in front of all branches: one barrier then stands in front of them, and none within.
    value_v = flat.slice(3 * D, D, 0).load(VALUES)
    for number in gl.static_range(L - 1):
        if number < count:
            then_decay = decay_rows.slice(number, 1, 0).load(TILE)
            then_key = key_rows.slice(number, 1, 0).load(TILE)
            then_delta = flat_deltas.slice(number * D, D, 0).load(VALUES)
            memory = gl.fma(gl.expand_dims(then_delta, 1), then_key, memory * then_decay)
    query = exchange.slice(0, 1, 0).load(TILE)
    key = exchange.slice(1, 1, 0).load(TILE)
    memory = memory * exchange.slice(2, 1, 0).load(TILE)
    squares_q, squares_k, agreement = gl.reduce((query * query, key * key, query * key), 1, add_triples)
    norm_q = gl.sum(gl.rsqrt(squares_q + L2_EPS), 0) * SCALE
    norm_k = gl.sum(gl.rsqrt(squares_k + L2_EPS), 0)
    recalled, read = gl.reduce((memory * key, memory * query), 1, add_pairs)
    delta = sigmoid(strength) * (value_v - recalled * norm_k)
    result = read * norm_q + delta * (gl.sum(agreement, 0) * norm_q * norm_k)
    factor = delta * norm_k
    if logs:
        gl.store(deltas + own + v, factor)
    else:
        memory = gl.fma(gl.expand_dims(factor, 1), key, memory)
        gl.store(place, memory.to(state.dtype.element_ty))
    if norm_weight is not None:
        result = result * gl.rsqrt(gl.sum(result * result, 0) / D + NORM_EPS) * factors.to(gl.float32)
    if out_gate is not None:
        result = result * sigmoid(opening.to(gl.float32))
    gl.store(out + (sequence * H + head) * D + v, result.to(out.dtype.element_ty))


def launch(
    qkv,
    conv_weight,
    conv_state,
    gate,
    dt_bias,
    a_log,
    beta,
    state,
    keys,
    decays,
    deltas,
    filled,
    out_gate=None,
    norm_weight=None,
    *,
    memory=torch,
):
    """The operator's tensors in schema order -> [B, 1, H, V]; states and records change in place."""
    out = memory.empty(CONSTANTS["out"], dtype=qkv.dtype, device=qkv.device)
    kda_logged_step[CONSTANTS["grid"]](
        qkv, conv_weight, conv_state, gate, dt_bias, a_log, beta, state, keys, decays, deltas, filled, out_gate,
        norm_weight, out,
        **CONSTANTS["kda_logged_step"], **CONSTANTS["options"],
    )  # fmt: skip
    return out
