# pyright: basic, reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false
# Kernel text: inside @gluon.jit, names are tensors and constants of a language whose types say little to a checker.
"""A few tokens of KDA whose states stay as they are, for heads of 128 on NVIDIA GPUs: 8 warps own one head's state.

Convolution, SiLU and gate of all tokens come first, so that all loads are on their way together; then the tokens pass
the state one after the other without a barrier between them; norm and output gate of all tokens come last.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kimigraph.codegen.templates.kda_gate import log_decay, sigmoid
from kimigraph.codegen.templates.kda_sums import add_pairs, add_triples
from kimigraph.codegen.templates.launch_order import let_next_launch_start


@gluon.jit
def kda_verify_step(
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
    out,
    keys,
    decays,
    deltas,
    inputs,
    states,
    S: gl.constexpr,
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
    """All S tokens of one (sequence, head): into ``keys``, ``decays`` and ``deltas`` goes what each adds to the state,
    or into ``states`` the state behind each; into ``inputs`` the raw projections."""
    D: gl.constexpr = 128
    WARPS: gl.constexpr = gl.num_warps()
    # The layouts of the decode kernel: sums of the state then have its order.
    TILE: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [WARPS, 1], [1, 0])
    VALUES: gl.constexpr = gl.SliceLayout(1, TILE)
    KEYS: gl.constexpr = gl.SliceLayout(0, TILE)
    WINDOW: gl.constexpr = gl.BlockedLayout([1, 2, 4], [1, 32, 1], [4, WARPS // 4, 1], [2, 1, 0])
    CHANNELS: gl.constexpr = gl.SliceLayout(2, WINDOW)
    OUTPUTS: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [WARPS, 1], [1, 0])
    let_next_launch_start()
    program = gl.program_id(0)
    head = program % H
    sequence = (program // H).to(gl.int64)
    v = gl.arange(0, D, layout=VALUES)
    k = gl.arange(0, D, layout=KEYS)
    within = gl.expand_dims(v * STATE_STRIDE[2], 1) + gl.expand_dims(k, 0)
    memory = gl.load(state + sequence * STATE_STRIDE[0] + head.to(gl.int64) * STATE_STRIDE[1] + within).to(gl.float32)

    row = gl.expand_dims(gl.arange(0, 4, layout=gl.SliceLayout(1, CHANNELS)), 1)
    at = gl.expand_dims(gl.arange(0, D, layout=gl.SliceLayout(0, CHANNELS)), 0)
    time = gl.expand_dims(gl.expand_dims(gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(0, WINDOW))), 0), 0)
    is_gate = (row == 2) & (at >= 0)
    mixes = gl.expand_dims((row != 2) & (at >= 0), 2) & (time >= 0)
    channel = gl.where(row == 3, 2, row) * (H * D) + head * D + at
    across = gl.expand_dims(channel, 2)
    conv_place = conv_state + sequence * CONV_STRIDE[0] + (across * CONV_STRIDE[1] + time * CONV_STRIDE[2])
    x_place = qkv + sequence * QKV_STRIDE[0] + (across * QKV_STRIDE[2] + time * QKV_STRIDE[1])
    gate_place = gate + sequence * GATE_STRIDE[0] + head * GATE_STRIDE[2] + at * GATE_STRIDE[3] + row * 0
    beta_place = beta + sequence * BETA_STRIDE[0] + head * BETA_STRIDE[2]
    taps = gl.load(conv_weight + (across * TAP_STRIDE[0] + time * TAP_STRIDE[1]), mask=mixes, other=0.0)
    bias_place = dt_bias + head * BIAS_STRIDE[0] + at * BIAS_STRIDE[1] + row * 0
    bias = gl.load(bias_place, mask=is_gate, other=0.0).to(gl.float32)
    rate = gl.exp(gl.load(a_log + head * RATE_STRIDE).to(gl.float32))

    # Rows 4 t to 4 t + 3 are q, k, exp(g) and v of token t.
    exchange = gl.allocate_shared_memory(gl.float32, [4 * PADDED, D], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    flat = exchange._reinterpret(gl.float32, [4 * PADDED * D], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    results = gl.allocate_shared_memory(gl.float32, [PADDED * D], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    strengths = ()
    for token in gl.static_range(S):
        # Place j of the window is the input of token - 3 + j, from this step or from the state before it.
        x = gl.load(x_place + (token - 3) * QKV_STRIDE[1], mask=mixes & (time >= 3 - token), other=0.0)
        old = gl.load(conv_place + token * CONV_STRIDE[2], mask=mixes & (time < 3 - token), other=0.0)
        logit = gl.load(gate_place + token * GATE_STRIDE[1], mask=is_gate, other=0.0)
        strengths = strengths + (gl.load(beta_place + token * BETA_STRIDE[1]),)
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
        exchange.slice(4 * token, 4, 0).store(value)
        record = (sequence * S + token) * H + head
        if keys is not None:
            gl.store(keys + record * D + at + row * 0, value, mask=(row == 1) & (at >= 0))
            gl.store(decays + record * D + at + row * 0, value, mask=is_gate)
        input_place = inputs + (sequence * S + token) * (3 * H * D) + across + time * 0
        gl.store(input_place, x.to(inputs.dtype.element_ty), mask=mixes & (time == 3))

    t = gl.expand_dims(gl.arange(0, PADDED, layout=gl.SliceLayout(1, OUTPUTS)), 1)
    c = gl.expand_dims(gl.arange(0, D, layout=gl.SliceLayout(0, OUTPUTS)), 0)
    is_token = (t < S) & (c >= 0)
    if out_gate is not None:
        out_gate_place = out_gate + sequence * OUT_GATE_STRIDE[0] + head * OUT_GATE_STRIDE[2]
        out_gate_place = out_gate_place + t * OUT_GATE_STRIDE[1] + c * OUT_GATE_STRIDE[3]
        out_gates = gl.load(out_gate_place, mask=is_token, other=0.0)
    if norm_weight is not None:
        factors = gl.load(norm_weight + c * NORM_STRIDE)

    for token in gl.static_range(S):
        query = exchange.slice(4 * token, 1, 0).load(TILE)
        key = exchange.slice(4 * token + 1, 1, 0).load(TILE)
        decay = exchange.slice(4 * token + 2, 1, 0).load(TILE)
        value = flat.slice((4 * token + 3) * D, D, 0).load(VALUES)
        squares_q, squares_k, agreement = gl.reduce((query * query, key * key, query * key), 1, add_triples)
        norm_q = gl.sum(gl.rsqrt(squares_q + L2_EPS), 0) * SCALE
        norm_k = gl.sum(gl.rsqrt(squares_k + L2_EPS), 0)
        agreement = gl.sum(agreement, 0) * norm_q * norm_k
        memory = memory * decay
        recalled, read = gl.reduce((memory * key, memory * query), 1, add_pairs)
        delta = sigmoid(strengths[token].to(gl.float32)) * (value - recalled * norm_k)
        results.slice(token * D, D, 0).store(read * norm_q + delta * agreement)
        # One rounding, as in decoding and in the fold: they then agree to the bit.
        factor = delta * norm_k
        memory = gl.fma(gl.expand_dims(factor, 1), key, memory)
        record = (sequence * S + token) * H + head
        if keys is not None:
            gl.store(deltas + record * D + v, factor)
        if states is not None:
            after = gl.expand_dims(v * D, 1) + gl.expand_dims(k, 0)
            gl.store(states + record * (D * D) + after, memory.to(states.dtype.element_ty))

    result = results._reinterpret(gl.float32, [PADDED, D], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])).load(OUTPUTS)
    if norm_weight is not None:
        scale = gl.rsqrt(gl.sum(result * result, 1) / D + NORM_EPS)
        result = result * gl.expand_dims(scale, 1) * factors.to(gl.float32)
    if out_gate is not None:
        result = result * sigmoid(out_gates.to(gl.float32))
    out_place = out + ((sequence * S + t) * H + head) * D + c
    gl.store(out_place, result.to(out.dtype.element_ty), mask=is_token)
