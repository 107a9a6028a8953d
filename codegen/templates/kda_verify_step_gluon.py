# pyright: basic, reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false
# Kernel text: inside @gluon.jit, names are tensors and constants of a language whose types say little to a checker.
"""A few tokens of KDA whose states stay as they are, for heads of 128 on NVIDIA GPUs: 8 warps own one head's state.

Convolution, SiLU and gate of all tokens come first, the loads of ``GROUP`` tokens on their way together; then the
tokens pass the state one after the other without a barrier between them; norm and output gate of all tokens come last.
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
    GROUP: gl.constexpr,
    N: gl.constexpr,
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
    # [q, k, gate, v; channel]: two channels a thread, whose latest inputs it keeps.
    CHANNELS: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [4, WARPS // 4], [1, 0])
    # Lanes that have the same rows of the state keep results of different tokens.
    RESULTS: gl.constexpr = gl.BlockedLayout([1, 1], [4, 8], [WARPS, 1], [1, 0])
    OUTPUTS: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [WARPS, 1], [1, 0])
    let_next_launch_start()
    program = gl.program_id(0)
    head = program % H
    sequence = (program // H).to(gl.int64)
    v = gl.arange(0, D, layout=VALUES)
    k = gl.arange(0, D, layout=KEYS)
    within = gl.expand_dims(v * STATE_STRIDE[2], 1) + gl.expand_dims(k * STATE_STRIDE[3], 0)
    memory = gl.load(state + sequence * STATE_STRIDE[0] + head.to(gl.int64) * STATE_STRIDE[1] + within).to(gl.float32)

    row = gl.expand_dims(gl.arange(0, 4, layout=gl.SliceLayout(1, CHANNELS)), 1)
    at = gl.expand_dims(gl.arange(0, D, layout=gl.SliceLayout(0, CHANNELS)), 0)
    is_gate = (row == 2) & (at >= 0)
    mixes = (row != 2) & (at >= 0)
    channel = gl.where(row == 3, 2, row) * (H * D) + head * D + at
    conv_place = conv_state + sequence * CONV_STRIDE[0] + channel * CONV_STRIDE[1] + (N - 3) * CONV_STRIDE[2]
    x_place = qkv + sequence * QKV_STRIDE[0] + channel * QKV_STRIDE[2]
    gate_place = gate + sequence * GATE_STRIDE[0] + head * GATE_STRIDE[2] + at * GATE_STRIDE[3] + row * 0
    beta_place = beta + sequence * BETA_STRIDE[0] + head * BETA_STRIDE[2]
    oldest = gl.load(conv_place, mask=mixes, other=0.0).to(gl.float32)
    older = gl.load(conv_place + CONV_STRIDE[2], mask=mixes, other=0.0).to(gl.float32)
    old = gl.load(conv_place + 2 * CONV_STRIDE[2], mask=mixes, other=0.0).to(gl.float32)
    taps = ()
    for tap in gl.static_range(4):
        tap_place = conv_weight + channel * TAP_STRIDE[0] + tap * TAP_STRIDE[1]
        taps = taps + (gl.load(tap_place, mask=mixes, other=0.0).to(gl.float32),)
    bias_place = dt_bias + head * BIAS_STRIDE[0] + at * BIAS_STRIDE[1] + row * 0
    bias = gl.load(bias_place, mask=is_gate, other=0.0).to(gl.float32)
    rate = gl.exp(gl.load(a_log + head * RATE_STRIDE).to(gl.float32))

    # Rows 4 t to 4 t + 3 are q, k, exp(g) and v of token t.
    exchange = gl.allocate_shared_memory(gl.float32, [4 * PADDED, D], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    flat = exchange._reinterpret(gl.float32, [4 * PADDED * D], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    numbers = gl.allocate_shared_memory(gl.float32, [4 * PADDED], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    at_token = gl.arange(0, PADDED, layout=VALUES)
    strength = gl.load(beta_place + at_token * BETA_STRIDE[1], mask=at_token < S, other=0.0)
    # The loads of a group come before its first store, behind which they would have to wait.
    for group in gl.static_range((S + GROUP - 1) // GROUP):
        inputs_of = ()
        logits = ()
        for ahead in gl.static_range(GROUP):
            if group * GROUP + ahead < S:
                x_at = x_place + (group * GROUP + ahead) * QKV_STRIDE[1]
                gate_at = gate_place + (group * GROUP + ahead) * GATE_STRIDE[1]
                inputs_of = inputs_of + (gl.load(x_at, mask=mixes, other=0.0),)
                logits = logits + (gl.load(gate_at, mask=is_gate, other=0.0),)
        for ahead in gl.static_range(GROUP):
            if group * GROUP + ahead < S:
                raw = inputs_of[ahead]
                logit = logits[ahead]
                x = raw.to(gl.float32)
                # The order of the decode kernel's sum.
                mixed = oldest * taps[0] + older * taps[1] + old * taps[2] + x * taps[3]
                oldest, older, old = older, old, x
                if LOWER_BOUND is None:
                    decay = gl.exp(log_decay(logit.to(gl.float32) + bias, rate, None))
                    value = gl.where(is_gate, decay, mixed * sigmoid(mixed))
                else:
                    # Either row needs one sigmoid: of the mixed inputs for SiLU, of the scaled logit for the gate.
                    mixed = gl.where(is_gate, rate * (logit.to(gl.float32) + bias), mixed)
                    share = sigmoid(mixed)
                    value = gl.where(is_gate, gl.exp(LOWER_BOUND * share), mixed * share)
                exchange.slice(4 * (group * GROUP + ahead), 4, 0).store(value)
                place = sequence * S + group * GROUP + ahead
                record = place * H + head
                if keys is not None:
                    gl.store(keys + record * D + at + row * 0, value, mask=(row == 1) & (at >= 0))
                    gl.store(decays + record * D + at + row * 0, value, mask=is_gate)
                gl.store(inputs + place * (3 * H * D) + channel, raw.to(inputs.dtype.element_ty), mask=mixes)

    t = gl.expand_dims(gl.arange(0, PADDED, layout=gl.SliceLayout(1, OUTPUTS)), 1)
    c = gl.expand_dims(gl.arange(0, D, layout=gl.SliceLayout(0, OUTPUTS)), 0)
    is_token = (t < S) & (c >= 0)
    if out_gate is not None:
        out_gate_place = out_gate + sequence * OUT_GATE_STRIDE[0] + head * OUT_GATE_STRIDE[2]
        out_gate_place = out_gate_place + t * OUT_GATE_STRIDE[1] + c * OUT_GATE_STRIDE[3]
        out_gates = gl.load(out_gate_place, mask=is_token, other=0.0)
    if norm_weight is not None:
        factors = gl.load(norm_weight + c * NORM_STRIDE)

    # Norms are numbers of a token: those of all tokens are summed at once, each in the order of the decode kernel.
    tokens = exchange._reinterpret(gl.float32, [PADDED, 4 * D], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    query = tokens.slice(0, D, 1).load(TILE)
    key = tokens.slice(D, D, 1).load(TILE)
    squares_q, squares_k, agreement = gl.reduce((query * query, key * key, query * key), 1, add_triples)
    norm_q = gl.rsqrt(squares_q + L2_EPS) * SCALE
    norm_k = gl.rsqrt(squares_k + L2_EPS)
    numbers.slice(0, PADDED, 0).store(norm_q)
    numbers.slice(PADDED, PADDED, 0).store(norm_k)
    numbers.slice(2 * PADDED, PADDED, 0).store(agreement * norm_q * norm_k)
    numbers.slice(3 * PADDED, PADDED, 0).store(sigmoid(strength.to(gl.float32)))

    of_token = gl.expand_dims(gl.arange(0, PADDED, layout=gl.SliceLayout(0, RESULTS)), 0)
    of_value = gl.expand_dims(gl.arange(0, D, layout=gl.SliceLayout(1, RESULTS)), 1) >= 0
    results = gl.zeros([D, PADDED], gl.float32, layout=RESULTS)
    for token in gl.static_range(S):
        query = exchange.slice(4 * token, 1, 0).load(TILE)
        key = exchange.slice(4 * token + 1, 1, 0).load(TILE)
        decay = exchange.slice(4 * token + 2, 1, 0).load(TILE)
        value = flat.slice((4 * token + 3) * D, D, 0).load(VALUES)
        norm_q = numbers.slice(token, 1, 0).load(VALUES)
        norm_k = numbers.slice(PADDED + token, 1, 0).load(VALUES)
        agreement = numbers.slice(2 * PADDED + token, 1, 0).load(VALUES)
        strength = numbers.slice(3 * PADDED + token, 1, 0).load(VALUES)
        memory = memory * decay
        recalled, read = gl.reduce((memory * key, memory * query), 1, add_pairs)
        delta = strength * (value - recalled * norm_k)
        result = gl.convert_layout(read * norm_q + delta * agreement, gl.SliceLayout(1, RESULTS))
        results = gl.where((of_token == token) & of_value, gl.expand_dims(result, 1), results)
        # One rounding, as in decoding and in the fold: they then agree to the bit.
        factor = delta * norm_k
        memory = gl.fma(gl.expand_dims(factor, 1), key, memory)
        record = (sequence * S + token) * H + head
        if keys is not None:
            gl.store(deltas + record * D + v, factor)
        if states is not None:
            after = gl.expand_dims(v * D, 1) + gl.expand_dims(k, 0)
            gl.store(states + record * (D * D) + after, memory.to(states.dtype.element_ty))

    turned = gl.allocate_shared_memory(gl.float32, [D, PADDED], gl.SwizzledSharedLayout(1, 1, 1, [0, 1]))
    turned.store(results)
    result = turned.permute((1, 0)).load(OUTPUTS)
    if norm_weight is not None:
        scale = gl.rsqrt(gl.sum(result * result, 1) / D + NORM_EPS)
        result = result * gl.expand_dims(scale, 1) * factors.to(gl.float32)
    if out_gate is not None:
        result = result * sigmoid(out_gates.to(gl.float32))
    out_place = out + ((sequence * S + t) * H + head) * D + c
    gl.store(out_place, result.to(out.dtype.element_ty), mask=is_token)
