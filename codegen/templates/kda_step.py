# pyright: basic
# Kernel text: inside @triton.jit, names are tensors of a language that type checkers do not know.
"""One KDA step with its neighbours in one launch; a program owns one head of one sequence, state and channels alike.

No two programs share a channel or a state element, so updating in place needs no order between programs. Inside one,
every read of the convolution state precedes a barrier, and its writes follow it.
"""

import triton
import triton.language as tl

from kimigraph.codegen.templates.kda_gate import log_decay, sigmoid
from kimigraph.codegen.templates.rounding import narrow


@triton.jit
def window_input(
    qkv_row,
    conv_row,
    channel,
    inside,
    token,
    time: tl.constexpr,
    S: tl.constexpr,
    QKV_STRIDE: tl.constexpr,
    CONV_STRIDE: tl.constexpr,
    N: tl.constexpr,
):
    """Raw input ``time`` steps before ``token`` as fp32, from this step's tokens or from the convolution state."""
    at = token - time
    # A first token finds all but its own input in the state, a token at least ``time`` finds none there.
    if time < S:
        place = qkv_row + at.to(tl.int64) * QKV_STRIDE[1] + channel * QKV_STRIDE[2]
        value = tl.load(place, mask=inside & (at >= 0), other=0.0).to(tl.float32)
    else:
        value = tl.zeros(channel.shape, tl.float32)
    if time > 0:
        place = conv_row + channel * CONV_STRIDE[1] + (N + at) * CONV_STRIDE[2]
        old = tl.load(place, mask=inside & (at < 0), other=0.0).to(tl.float32)
        value = tl.where(at < 0, old, value)
    return value


@triton.jit
def short_convolution(
    qkv_row,
    conv_row,
    conv_weight,
    channel,
    inside,
    token,
    S: tl.constexpr,
    QKV_STRIDE: tl.constexpr,
    CONV_STRIDE: tl.constexpr,
    TAP_STRIDE: tl.constexpr,
    N: tl.constexpr,
    W: tl.constexpr,
):
    """SiLU of the causal depthwise convolution at ``token``."""
    mixed = tl.zeros(channel.shape, tl.float32)
    for time in tl.static_range(W - 1, -1, -1):
        value = window_input(qkv_row, conv_row, channel, inside, token, time, S, QKV_STRIDE, CONV_STRIDE, N)
        tap = tl.load(conv_weight + channel * TAP_STRIDE[0] + (W - 1 - time) * TAP_STRIDE[1], mask=inside, other=0.0)
        mixed += value * tap.to(tl.float32)
    return mixed * sigmoid(mixed)


@triton.jit
def next_columns(
    qkv_row,
    conv_row,
    channel,
    inside,
    S: tl.constexpr,
    QKV_STRIDE: tl.constexpr,
    CONV_STRIDE: tl.constexpr,
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """The convolution state after the step, [channels, columns]: old columns moved left by S, then the new inputs."""
    source = tl.arange(0, BLOCK_N)[None, :] + S
    rows = channel[:, None]
    old = tl.load(
        conv_row + rows * CONV_STRIDE[1] + source * CONV_STRIDE[2], mask=inside[:, None] & (source < N), other=0.0
    )
    at = source - N
    is_new = inside[:, None] & (at >= 0) & (at < S)
    new = tl.load(qkv_row + at.to(tl.int64) * QKV_STRIDE[1] + rows * QKV_STRIDE[2], mask=is_new, other=0.0)
    return tl.where(source < N, old, narrow(new.to(tl.float32), conv_row, INTERPRET))


@triton.jit
def store_columns(
    conv_row, columns, channel, inside, CONV_STRIDE: tl.constexpr, N: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Write the columns that ``next_columns`` gave."""
    column = tl.arange(0, BLOCK_N)[None, :]
    place = conv_row + channel[:, None] * CONV_STRIDE[1] + column * CONV_STRIDE[2]
    tl.store(place, columns, mask=inside[:, None] & (column < N))


@triton.jit
def copy_inputs(raw_row, input_row, channel, inside, QKV_STRIDE: tl.constexpr, INTERPRET: tl.constexpr):
    """Keep a token's raw projections as the convolution's state would."""
    raw = tl.load(raw_row + channel * QKV_STRIDE[2], mask=inside, other=0.0).to(tl.float32)
    tl.store(input_row + channel, narrow(raw, input_row, INTERPRET), mask=inside)


@triton.jit
def decay_of(
    gate_row,
    gate_weight,
    dt_bias,
    a_log,
    head,
    k,
    in_k,
    GATE_STRIDE: tl.constexpr,
    GATE_WEIGHT_STRIDE: tl.constexpr,
    BIAS_STRIDE: tl.constexpr,
    RATE_STRIDE: tl.constexpr,
    LOWER_BOUND: tl.constexpr,
    K: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """exp(g) for each key channel of the head, in either form of the gate, from logits or what they are made of."""
    if gate_weight is None:
        raw = tl.load(gate_row + k * GATE_STRIDE[3], mask=in_k, other=0.0).to(tl.float32)
    else:
        r = tl.arange(0, BLOCK_R)
        low = tl.load(gate_row + r * GATE_STRIDE[3], mask=r < RANK, other=0.0).to(tl.float32)
        places = gate_weight + (head * K + k).to(tl.int64)[:, None] * GATE_WEIGHT_STRIDE[0]
        places = places + r[None, :] * GATE_WEIGHT_STRIDE[1]
        weight = tl.load(places, mask=in_k[:, None] & (r < RANK)[None, :], other=0.0).to(tl.float32)
        raw = tl.sum(weight * low[None, :], 1)
    bias = tl.load(dt_bias + head * BIAS_STRIDE[0] + k * BIAS_STRIDE[1], mask=in_k, other=0.0).to(tl.float32)
    rate = tl.exp(tl.load(a_log + head * RATE_STRIDE).to(tl.float32))
    return tl.exp(log_decay(raw + bias, rate, LOWER_BOUND))


@triton.jit
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
    keys,
    decays,
    deltas,
    inputs,
    states,
    filled,
    S: tl.constexpr,
    L: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    W: tl.constexpr,
    N: tl.constexpr,
    SCALE: tl.constexpr,
    L2_EPS: tl.constexpr,
    LOWER_BOUND: tl.constexpr,
    NORM_EPS: tl.constexpr,
    QKV_STRIDE: tl.constexpr,
    TAP_STRIDE: tl.constexpr,
    CONV_STRIDE: tl.constexpr,
    GATE_STRIDE: tl.constexpr,
    GATE_WEIGHT_STRIDE: tl.constexpr,
    RANK: tl.constexpr,
    BIAS_STRIDE: tl.constexpr,
    RATE_STRIDE: tl.constexpr,
    BETA_STRIDE: tl.constexpr,
    STATE_STRIDE: tl.constexpr,
    OUT_GATE_STRIDE: tl.constexpr,
    NORM_STRIDE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """All S tokens of one (sequence, head): the state [V, K] is read once, lives in registers and is written once.

    With ``inputs`` neither state is written: the raw projections go there, and what each token adds to the state into
    ``keys``, ``decays`` and ``deltas``, or the state behind each token into ``states``.

    With ``filled`` the state lies that many tokens behind (fewer than L), whose records come first. The token becomes
    the next record or, as the L-th, writes the state.
    """
    sequence = (tl.program_id(0) // H).to(tl.int64)
    head = tl.program_id(0) % H
    k = tl.arange(0, BLOCK_K)
    v = tl.arange(0, BLOCK_V)
    in_k = k < K
    in_v = v < V
    own_k = in_k
    own_v = in_v
    slot = sequence
    if slots is not None:
        # A row without a slot works on zeros, of which its output is zero.
        slot = tl.load(slots + sequence).to(tl.int64)
        own_k = in_k & (slot > 0)
        own_v = in_v & (slot > 0)
    # STATE_STRIDE is (sequence, head, value channel, key channel) in either layout.
    place = state + slot * STATE_STRIDE[0] + head.to(tl.int64) * STATE_STRIDE[1]
    place = place + v[:, None] * STATE_STRIDE[2] + k[None, :] * STATE_STRIDE[3]
    in_state = own_v[:, None] & own_k[None, :]
    memory = tl.load(place, mask=in_state, other=0.0).to(tl.float32)
    writes = inputs is None
    if filled is not None:
        count = tl.load(filled + sequence).to(tl.int32)
        writes = count + 1 == L
        own_log = sequence * (L * H) + head
        for number in range(count):
            record = own_log + number * H
            then_decay = tl.load(decays + record * K + k, mask=in_k, other=0.0)
            then_key = tl.load(keys + record * K + k, mask=in_k, other=0.0)
            then_delta = tl.load(deltas + record * V + v, mask=in_v, other=0.0)
            memory = tl.fma(then_delta[:, None], then_key[None, :], memory * then_decay[None, :])
    qkv_row = qkv + sequence * QKV_STRIDE[0]
    conv_row = conv_state + slot * CONV_STRIDE[0]
    q_channel = (head * K + k).to(tl.int64)
    k_channel = q_channel + H * K
    v_channel = (2 * H * K + head * V + v).to(tl.int64)
    for step in range(S):
        token = tl.full([], step, tl.int32)
        query = short_convolution(
            qkv_row, conv_row, conv_weight, q_channel, own_k, token, S, QKV_STRIDE, CONV_STRIDE, TAP_STRIDE, N, W
        )
        key = short_convolution(
            qkv_row, conv_row, conv_weight, k_channel, own_k, token, S, QKV_STRIDE, CONV_STRIDE, TAP_STRIDE, N, W
        )
        value = short_convolution(
            qkv_row, conv_row, conv_weight, v_channel, own_v, token, S, QKV_STRIDE, CONV_STRIDE, TAP_STRIDE, N, W
        )
        gate_row = gate + sequence * GATE_STRIDE[0] + token.to(tl.int64) * GATE_STRIDE[1] + head * GATE_STRIDE[2]
        decay = decay_of(
            gate_row, gate_weight, dt_bias, a_log, head, k, in_k, GATE_STRIDE, GATE_WEIGHT_STRIDE, BIAS_STRIDE,
            RATE_STRIDE, LOWER_BOUND, K, RANK, BLOCK_R
        )  # fmt: skip
        beta_at = beta + sequence * BETA_STRIDE[0] + token.to(tl.int64) * BETA_STRIDE[1] + head * BETA_STRIDE[2]
        strength = sigmoid(tl.load(beta_at).to(tl.float32))
        query = query * (tl.rsqrt(tl.sum(query * query, 0) + L2_EPS) * SCALE)
        norm = tl.rsqrt(tl.sum(key * key, 0) + L2_EPS)
        unit = key * norm
        memory = memory * decay[None, :]
        # The read-out of the new state is that of the decayed one plus delta * (k . q): one sweep over the state.
        recalled = tl.sum(memory * unit[None, :], 1)
        read = tl.sum(memory * query[None, :], 1)
        delta = strength * (value - recalled)
        result = read + delta * tl.sum(unit * query, 0)
        # One rounding, here and where records are replayed: the two then agree to the bit.
        delta = delta * norm
        memory = tl.fma(delta[:, None], key[None, :], memory)
        if norm_weight is not None:
            factor = tl.load(norm_weight + v * NORM_STRIDE, mask=in_v, other=0.0).to(tl.float32)
            result = result * tl.rsqrt(tl.sum(result * result, 0) / V + NORM_EPS) * factor
        if out_gate is not None:
            gate_at = out_gate + sequence * OUT_GATE_STRIDE[0] + token.to(tl.int64) * OUT_GATE_STRIDE[1]
            gate_at = gate_at + head * OUT_GATE_STRIDE[2] + v * OUT_GATE_STRIDE[3]
            result = result * sigmoid(tl.load(gate_at, mask=in_v, other=0.0).to(tl.float32))
        out_row = out + ((sequence * S + token) * H + head) * V
        tl.store(out_row + v, narrow(result, out, INTERPRET), mask=in_v)
        if filled is not None:
            if not writes:
                record = own_log + count * H
                tl.store(keys + record * K + k, key, mask=in_k)
                tl.store(decays + record * K + k, decay, mask=in_k)
                tl.store(deltas + record * V + v, delta, mask=in_v)
        if inputs is not None:
            record = (sequence * S + token) * H + head
            if states is not None:
                after = states + record * (K * V) + v[:, None] * STATE_STRIDE[2] + k[None, :] * STATE_STRIDE[3]
                tl.store(after, narrow(memory, states, INTERPRET), mask=in_state)
            else:
                tl.store(keys + record * K + k, key, mask=in_k)
                tl.store(decays + record * K + k, decay, mask=in_k)
                tl.store(deltas + record * V + v, delta, mask=in_v)
            input_row = inputs + (sequence * S + token) * (H * (2 * K + V))
            raw_row = qkv_row + token.to(tl.int64) * QKV_STRIDE[1]
            copy_inputs(raw_row, input_row, q_channel, in_k, QKV_STRIDE, INTERPRET)
            copy_inputs(raw_row, input_row, k_channel, in_k, QKV_STRIDE, INTERPRET)
            copy_inputs(raw_row, input_row, v_channel, in_v, QKV_STRIDE, INTERPRET)
    if writes:
        tl.store(place, narrow(memory, state, INTERPRET), mask=in_state)
    if (N > 0) & (inputs is None):
        new_q = next_columns(qkv_row, conv_row, q_channel, own_k, S, QKV_STRIDE, CONV_STRIDE, N, BLOCK_N, INTERPRET)
        new_k = next_columns(qkv_row, conv_row, k_channel, own_k, S, QKV_STRIDE, CONV_STRIDE, N, BLOCK_N, INTERPRET)
        new_v = next_columns(qkv_row, conv_row, v_channel, own_v, S, QKV_STRIDE, CONV_STRIDE, N, BLOCK_N, INTERPRET)
        # Columns move between threads: all of them are read before any is written.
        tl.debug_barrier()
        store_columns(conv_row, new_q, q_channel, own_k, CONV_STRIDE, N, BLOCK_N)
        store_columns(conv_row, new_k, k_channel, own_k, CONV_STRIDE, N, BLOCK_N)
        store_columns(conv_row, new_v, v_channel, own_v, CONV_STRIDE, N, BLOCK_N)
