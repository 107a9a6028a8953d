# pyright: basic, reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false
# Kernel text: inside @gluon.jit, names are tensors and constants of a language whose types say little to a checker.
"""One KDA step with its neighbours in one launch, for heads of 128 on NVIDIA GPUs: 8 warps own one head's state.

Every load is issued before the first arithmetic, and q, k, the gate and v go through convolution, SiLU and gate as the
rows of one tile, so that what is around the state costs no time of its own.
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
def load_state(place, live, STREAM: gl.constexpr):
    """A tile of the state in fp32; ``STREAM`` keeps it from displacing what other programs still need.

    ``live`` is None, or a mask of a row's own entry in the pool.
    """
    POLICY: gl.constexpr = "evict_first" if STREAM else ""
    if live is None:
        value = gl.load(place, eviction_policy=POLICY)
    else:
        value = gl.load(place, mask=live, other=0.0, eviction_policy=POLICY)
    return value.to(gl.float32)


@gluon.jit
def store_state(place, value, live, STREAM: gl.constexpr):
    """Write a tile of the state in its own type."""
    MODIFIER: gl.constexpr = ".cs" if STREAM else ""
    gl.store(place, value.to(place.dtype.element_ty), mask=live, cache_modifier=MODIFIER)


@gluon.jit
def kda_step(
    qkv,
    conv_weight,
    conv_state,
    gate,
    dt_bias,
    a_log,
    beta,
    state,
    out_gate,
    norm_weight,
    slots,
    gate_weight,
    out,
    S: gl.constexpr,
    H: gl.constexpr,
    SCALE: gl.constexpr,
    L2_EPS: gl.constexpr,
    LOWER_BOUND: gl.constexpr,
    NORM_EPS: gl.constexpr,
    QKV_STRIDE: gl.constexpr,
    TAP_STRIDE: gl.constexpr,
    CONV_STRIDE: gl.constexpr,
    GATE_STRIDE: gl.constexpr,
    GATE_WEIGHT_STRIDE: gl.constexpr,
    RANK: gl.constexpr,
    BIAS_STRIDE: gl.constexpr,
    RATE_STRIDE: gl.constexpr,
    BETA_STRIDE: gl.constexpr,
    STATE_STRIDE: gl.constexpr,
    OUT_GATE_STRIDE: gl.constexpr,
    NORM_STRIDE: gl.constexpr,
    BLOCK_R: gl.constexpr,
    BLOCKS: gl.constexpr,
    STREAM: gl.constexpr,
):
    """All S tokens of one (sequence, head); the state [V, K] is taken in ``BLOCKS`` parts of V, each loaded ahead."""
    D: gl.constexpr = 128
    WARPS: gl.constexpr = gl.num_warps()
    ROWS: gl.constexpr = D // BLOCKS
    # A row of K channels lies in 8 lanes, 16 bytes each: a sum over it is within a thread and three exchanges.
    TILE: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [WARPS, 1], [1, 0])
    VALUES: gl.constexpr = gl.SliceLayout(1, TILE)
    KEYS: gl.constexpr = gl.SliceLayout(0, TILE)
    # [q, k, gate, v; channel; time]: two channels a thread, with all the inputs that their convolution mixes.
    WINDOW: gl.constexpr = gl.BlockedLayout([1, 2, 4], [1, 32, 1], [4, WARPS // 4, 1], [2, 1, 0])
    CHANNELS: gl.constexpr = gl.SliceLayout(2, WINDOW)
    # A product follows, whose weights can be on their way meanwhile.
    let_next_launch_start()
    program = gl.program_id(0)
    head = program % H
    sequence = (program // H).to(gl.int64)
    slot = sequence
    if slots is not None:
        slot = gl.load(slots + sequence).to(gl.int64)
    v = gl.arange(0, ROWS, layout=VALUES)
    k = gl.arange(0, D, layout=KEYS)
    place = state + slot * STATE_STRIDE[0] + head.to(gl.int64) * STATE_STRIDE[1]
    place = place + gl.expand_dims(v * STATE_STRIDE[2], 1) + gl.expand_dims(k, 0)
    # A row without a slot works on zeros, of which its output is zero.
    live = None
    if slots is not None:
        live = (gl.expand_dims(v, 1) >= 0) & (gl.expand_dims(k, 0) >= 0) & (slot > 0)

    row = gl.expand_dims(gl.arange(0, 4, layout=gl.SliceLayout(1, CHANNELS)), 1)
    at = gl.expand_dims(gl.arange(0, D, layout=gl.SliceLayout(0, CHANNELS)), 0)
    time = gl.expand_dims(gl.expand_dims(gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(0, WINDOW))), 0), 0)
    is_gate = (row == 2) & (at >= 0)
    mixes = gl.expand_dims((row != 2) & (at >= 0), 2) & (time >= 0)
    if slots is not None:
        mixes = mixes & (slot > 0)
    channel = gl.where(row == 3, 2, row) * (H * D) + head * D + at
    across = gl.expand_dims(channel, 2)
    conv_place = conv_state + slot * CONV_STRIDE[0] + (across * CONV_STRIDE[1] + time * CONV_STRIDE[2])
    x_place = qkv + sequence * QKV_STRIDE[0] + (across * QKV_STRIDE[2] + time * QKV_STRIDE[1])
    gate_place = gate + sequence * GATE_STRIDE[0] + head * GATE_STRIDE[2] + at * GATE_STRIDE[3] + row * 0
    beta_place = beta + sequence * BETA_STRIDE[0] + head * BETA_STRIDE[2]

    # Of token t, place j of the window is the input of token t - 3 + j, from this step or from the state before it.
    x = gl.load(x_place - 3 * QKV_STRIDE[1], mask=mixes & (time == 3), other=0.0)
    old = gl.load(conv_place, mask=mixes & (time < 3), other=0.0)
    taps = gl.load(conv_weight + (across * TAP_STRIDE[0] + time * TAP_STRIDE[1]), mask=mixes, other=0.0)
    strength = gl.load(beta_place)
    bias_place = dt_bias + head * BIAS_STRIDE[0] + at * BIAS_STRIDE[1] + row * 0
    bias = gl.load(bias_place, mask=is_gate, other=0.0).to(gl.float32)
    rate = gl.load(a_log + head * RATE_STRIDE).to(gl.float32)
    if gate_weight is None:
        logit = gl.load(gate_place, mask=is_gate, other=0.0)
    else:
        # What the logits are made of: the head's rows of the weight, on their way before the state.
        PRODUCT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
        r = gl.arange(0, BLOCK_R, layout=gl.SliceLayout(0, PRODUCT))
        weight_row = head * D + gl.arange(0, D, layout=gl.SliceLayout(1, PRODUCT))
        weight_place = gl.expand_dims(weight_row * GATE_WEIGHT_STRIDE[0], 1)
        weight_place = gate_weight + (weight_place + gl.expand_dims(r * GATE_WEIGHT_STRIDE[1], 0))
        gate_rows = gl.load(
            weight_place, mask=gl.expand_dims(r < RANK, 0) & gl.expand_dims(weight_row >= 0, 1), other=0.0
        )
        low_place = gate + sequence * GATE_STRIDE[0] + r * GATE_STRIDE[3]
        low = gl.load(low_place, mask=r < RANK, other=0.0)
        logits = gl.allocate_shared_memory(gl.float32, [D], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    ahead = load_state(place, live, STREAM)
    rate = gl.exp(rate)

    # q, k, exp(g) and v of a token pass from their own layout to that of the state.
    exchange = gl.allocate_shared_memory(gl.float32, [4, D], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    flat = exchange._reinterpret(gl.float32, [4 * D], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    for token in gl.static_range(S):
        if token > 0:
            x = gl.load(x_place + (token - 3) * QKV_STRIDE[1], mask=mixes & (time >= 3 - token), other=0.0)
            old = gl.load(conv_place + token * CONV_STRIDE[2], mask=mixes & (time < 3 - token), other=0.0)
            if gate_weight is None:
                logit = gl.load(gate_place + token * GATE_STRIDE[1], mask=is_gate, other=0.0)
            else:
                low = gl.load(low_place + token * GATE_STRIDE[1], mask=r < RANK, other=0.0)
            strength = gl.load(beta_place + token * BETA_STRIDE[1])
        out_gates = ()
        factors = ()
        for block in gl.static_range(BLOCKS):
            channel_v = block * ROWS + v
            if out_gate is not None:
                out_gate_place = out_gate + sequence * OUT_GATE_STRIDE[0] + token * OUT_GATE_STRIDE[1]
                out_gate_place = out_gate_place + head * OUT_GATE_STRIDE[2] + channel_v * OUT_GATE_STRIDE[3]
                out_gates = out_gates + (gl.load(out_gate_place),)
            if norm_weight is not None:
                factors = factors + (gl.load(norm_weight + channel_v * NORM_STRIDE),)
        if gate_weight is not None:
            logits.store(gl.sum(gate_rows.to(gl.float32) * gl.expand_dims(low.to(gl.float32), 0), 1))
            logit = gl.expand_dims(logits.load(gl.SliceLayout(0, CHANNELS)), 0)
        window = gl.where(time >= 3 - token, x.to(gl.float32), old.to(gl.float32))
        mixed = gl.sum(window * taps.to(gl.float32), 2)
        if LOWER_BOUND is None:
            decay = gl.exp(log_decay(logit.to(gl.float32) + bias, rate, None))
            value = gl.where(is_gate, decay, mixed * sigmoid(mixed))
        else:
            # Either row needs one sigmoid: of the mixed inputs for SiLU, of the scaled logit for the bounded gate.
            mixed = gl.where(is_gate, rate * (logit.to(gl.float32) + bias), mixed)
            share = sigmoid(mixed)
            value = gl.where(is_gate, gl.exp(LOWER_BOUND * share), mixed * share)
        exchange.store(value)
        query = exchange.slice(0, 1, 0).load(TILE)
        key = exchange.slice(1, 1, 0).load(TILE)
        decay = exchange.slice(2, 1, 0).load(TILE)
        # Norms are factors of a program here: the vectors themselves stay as they are.
        squares_q, squares_k, agreement = gl.reduce((query * query, key * key, query * key), 1, add_triples)
        norm_q = gl.sum(gl.rsqrt(squares_q + L2_EPS), 0) * SCALE
        norm_k = gl.sum(gl.rsqrt(squares_k + L2_EPS), 0)
        agreement = gl.sum(agreement, 0) * norm_q * norm_k
        squares = gl.zeros([ROWS], gl.float32, layout=VALUES)
        results = ()
        for block in gl.static_range(BLOCKS):
            memory = ahead * decay
            if block + 1 < BLOCKS:
                ahead = load_state(place + (block + 1) * ROWS * STATE_STRIDE[2], live, STREAM)
            value = flat.slice(3 * D + block * ROWS, ROWS, 0).load(VALUES)
            # The read-out of the new state is that of the decayed one plus delta * (k . q): one sweep over the state.
            recalled, read = gl.reduce((memory * key, memory * query), 1, add_pairs)
            delta = sigmoid(strength.to(gl.float32)) * (value - recalled * norm_k)
            result = read * norm_q + delta * agreement
            # One rounding, here and where tokens are verified and replayed: they then agree to the bit.
            memory = gl.fma(gl.expand_dims(delta * norm_k, 1), key, memory)
            if S == 1:
                store_state(place + block * ROWS * STATE_STRIDE[2], memory, live, STREAM)
            else:
                ahead = memory
            squares += result * result
            results = results + (result,)
        if token + 1 == S:
            # Every read of the convolution state came before the exchange above.
            kept = gl.where(time >= 3 - token, x.to(old.dtype), old)
            gl.store(conv_place - CONV_STRIDE[2], kept, mask=mixes & (time > 0))
        if norm_weight is not None:
            scale = gl.rsqrt(gl.sum(squares, 0) / D + NORM_EPS)
        out_row = out + ((sequence * S + token) * H + head) * D
        for block in gl.static_range(BLOCKS):
            result = results[block]
            if norm_weight is not None:
                result = result * scale * factors[block].to(gl.float32)
            if out_gate is not None:
                result = result * sigmoid(out_gates[block].to(gl.float32))
            gl.store(out_row + block * ROWS + v, result.to(out.dtype.element_ty))
    if S > 1:
        store_state(place, ahead, live, STREAM)


def launch(
    qkv,
    conv_weight,
    conv_state,
    gate,
    dt_bias,
    a_log,
    beta,
    state,
    out_gate=None,
    norm_weight=None,
    slots=None,
    gate_weight=None,
    *,
    memory=torch,
):
    """The operator's tensors in schema order -> [B, S, H, V]; ``conv_state`` and ``state`` change in place."""
    out = memory.empty(CONSTANTS["out"], dtype=qkv.dtype, device=qkv.device)
    kda_step[CONSTANTS["grid"]](
        qkv, conv_weight, conv_state, gate, dt_bias, a_log, beta, state, out_gate, norm_weight, slots,
        gate_weight, out,
        **CONSTANTS["kda_step"], **CONSTANTS["options"],
    )  # fmt: skip
    return out
