# pyright: basic, reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false
# Kernel text: inside @gluon.jit, names are tensors and constants of a language whose types say little to a checker.
"""Records of accepted tokens folded into the states of all layers in one launch, for heads of 128 on NVIDIA GPUs.

A program's part of the state and all its records are on their way together; no token waits for memory of its own.
"""

from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

CONSTANTS: dict[str, Any] = {}


@gluon.jit
def move_columns(conv_row, input_row, first, count, C: gl.constexpr, CONV_STRIDE: gl.constexpr, N: gl.constexpr):
    """Move the convolution's columns of 128 channels on by ``count`` tokens; no thread writes what another reads."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    channel = (first + gl.arange(0, 128, layout=LAYOUT)).to(gl.int64)
    columns = ()
    for column in gl.static_range(N):
        source = column + count
        old = gl.load(
            conv_row + channel * CONV_STRIDE[2] + source * CONV_STRIDE[3], mask=(source < N) & (channel >= 0), other=0.0
        )
        new = gl.load(input_row + (source - N) * C + channel, mask=(source >= N) & (channel >= 0), other=0.0)
        columns = columns + (gl.where((source < N) & (channel >= 0), old, new),)
    for column in gl.static_range(N):
        gl.store(conv_row + channel * CONV_STRIDE[2] + column * CONV_STRIDE[3], columns[column])


@gluon.jit
def kda_replay(
    state,
    conv_state,
    keys,
    decays,
    deltas,
    inputs,
    accepted,
    P: gl.constexpr,
    S: gl.constexpr,
    PADDED: gl.constexpr,
    H: gl.constexpr,
    N: gl.constexpr,
    STATE_STRIDE: gl.constexpr,
    CONV_STRIDE: gl.constexpr,
    TILE_V: gl.constexpr,
):
    """``TILE_V`` value channels of a head: the tile stays in registers while the accepted tokens pass."""
    D: gl.constexpr = 128
    TILES: gl.constexpr = D // TILE_V
    WARPS: gl.constexpr = gl.num_warps()
    # A thread has runs of four keys and of four values, which it reads from shared memory in one piece each.
    TILE: gl.constexpr = gl.BlockedLayout([4, 4], [1, 32], [WARPS, 1], [1, 0])
    VALUES: gl.constexpr = gl.SliceLayout(1, TILE)
    KEYS: gl.constexpr = gl.SliceLayout(0, TILE)
    WIDE: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [WARPS, 1], [1, 0])
    NARROW: gl.constexpr = gl.BlockedLayout([1, 4], [128 // TILE_V, TILE_V // 4], [WARPS, 1], [1, 0])
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    tile = gl.program_id(0) % TILES
    head = gl.program_id(0) // TILES
    row = gl.program_id(1).to(gl.int64)
    layer = gl.program_id(2).to(gl.int64)
    count = gl.minimum(gl.load(accepted + row).to(gl.int32), S)
    if count > 0:
        v = tile * TILE_V + gl.arange(0, TILE_V, layout=VALUES)
        k = gl.arange(0, D, layout=KEYS)
        # STATE_STRIDE is (layer, sequence, head, value channel, key channel) in either layout.
        place = state + layer * STATE_STRIDE[0] + row * STATE_STRIDE[1] + head.to(gl.int64) * STATE_STRIDE[2]
        place = place + gl.expand_dims(v * STATE_STRIDE[3], 1) + gl.expand_dims(k, 0)
        first = (layer * P + row) * S
        token = gl.expand_dims(gl.arange(0, PADDED, layout=gl.SliceLayout(1, WIDE)), 1)
        channel = gl.expand_dims(gl.arange(0, D, layout=gl.SliceLayout(0, WIDE)), 0)
        record = ((first + token) * H + head) * D + channel
        live = (token < count) & (channel >= 0)
        own_token = gl.expand_dims(gl.arange(0, PADDED, layout=gl.SliceLayout(1, NARROW)), 1)
        own = gl.expand_dims(tile * TILE_V + gl.arange(0, TILE_V, layout=gl.SliceLayout(0, NARROW)), 0)
        own_record = ((first + own_token) * H + head) * D + own
        decay = gl.load(decays + record, mask=live, other=0.0)
        key = gl.load(keys + record, mask=live, other=0.0)
        delta = gl.load(deltas + own_record, mask=(own_token < count) & (own >= 0), other=0.0)
        memory = gl.load(place).to(gl.float32)
        decay_rows = gl.allocate_shared_memory(gl.float32, [PADDED, D], LINE)
        key_rows = gl.allocate_shared_memory(gl.float32, [PADDED, D], LINE)
        delta_rows = gl.allocate_shared_memory(gl.float32, [PADDED, TILE_V], LINE)
        decay_rows.store(decay)
        key_rows.store(key)
        delta_rows.store(delta)
        for at in gl.static_range(S):
            if at < count:
                flat = delta_rows._reinterpret(gl.float32, [PADDED * TILE_V], gl.SwizzledSharedLayout(1, 1, 1, [0]))
                now_decay = decay_rows.slice(at, 1, 0).load(TILE)
                now_key = key_rows.slice(at, 1, 0).load(TILE)
                now_delta = flat.slice(at * TILE_V, TILE_V, 0).load(VALUES)
                memory = gl.fma(gl.expand_dims(now_delta, 1), now_key, memory * now_decay)
        gl.store(place, memory.to(state.dtype.element_ty))
        if (N > 0) & (tile == 0):
            C: gl.constexpr = 3 * H * D
            conv_row = conv_state + layer * CONV_STRIDE[0] + row * CONV_STRIDE[1]
            for part in gl.static_range(3):
                move_columns(conv_row, inputs + first * C, (part * H + head) * D, count, C, CONV_STRIDE, N)


def launch(state, conv_state, keys, decays, deltas, inputs, accepted, *, memory=torch):
    """The operator's tensors in schema order; ``state`` and ``conv_state`` change in place."""
    kda_replay[CONSTANTS["grid"]](
        state, conv_state, keys, decays, deltas, inputs, accepted, **CONSTANTS["kda_replay"], **CONSTANTS["options"]
    )
