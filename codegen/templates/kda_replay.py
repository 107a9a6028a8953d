# pyright: basic
# Kernel text: inside @triton.jit, names are tensors of a language that type checkers do not know.
"""Records of accepted tokens folded into the states of all layers in one launch.

A program owns some value channels of one head of one sequence in one layer. Nothing of a state but these elements
enters them, so a token is a product and a sum an element; what takes time is the state, read and written once.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from triton import knobs

from kimigraph.codegen.templates.rounding import narrow

INTERPRET = knobs.runtime.interpret
CONSTANTS: dict[str, Any] = {}


@triton.jit
def moved_columns(
    conv_row,
    input_row,
    channel,
    inside,
    count,
    C: tl.constexpr,
    CONV_STRIDE: tl.constexpr,
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """The convolution state behind ``count`` tokens, [channels, columns]: old columns moved left, then new inputs."""
    source = tl.arange(0, BLOCK_N)[None, :] + count
    rows = channel[:, None]
    within = inside[:, None] & (tl.arange(0, BLOCK_N)[None, :] < N)
    old = tl.load(conv_row + rows * CONV_STRIDE[2] + source * CONV_STRIDE[3], mask=within & (source < N), other=0.0)
    new = tl.load(input_row + (source - N).to(tl.int64) * C + rows, mask=within & (source >= N), other=0.0)
    return tl.where(source < N, old, new)


@triton.jit
def store_moved(conv_row, columns, channel, inside, CONV_STRIDE: tl.constexpr, N: tl.constexpr, BLOCK_N: tl.constexpr):
    """Write the columns that ``moved_columns`` gave."""
    column = tl.arange(0, BLOCK_N)[None, :]
    place = conv_row + channel[:, None] * CONV_STRIDE[2] + column * CONV_STRIDE[3]
    tl.store(place, columns, mask=inside[:, None] & (column < N))


@triton.jit
def kda_replay(
    state,
    conv_state,
    keys,
    decays,
    deltas,
    inputs,
    accepted,
    P: tl.constexpr,
    S: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    N: tl.constexpr,
    STATE_STRIDE: tl.constexpr,
    CONV_STRIDE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TILE_V: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """``TILE_V`` value channels of a head: the tile stays in registers while the accepted tokens pass."""
    tile = tl.program_id(0) % TILES
    head = tl.program_id(0) // TILES
    row = tl.program_id(1).to(tl.int64)
    layer = tl.program_id(2).to(tl.int64)
    count = tl.minimum(tl.load(accepted + row).to(tl.int32), S)
    if count > 0:
        k = tl.arange(0, BLOCK_K)
        v = tile * TILE_V + tl.arange(0, TILE_V)
        in_k = k < K
        in_v = v < V
        # STATE_STRIDE is (layer, sequence, head, value channel, key channel) in either layout.
        place = state + layer * STATE_STRIDE[0] + row * STATE_STRIDE[1] + head.to(tl.int64) * STATE_STRIDE[2]
        place = place + v[:, None] * STATE_STRIDE[3] + k[None, :] * STATE_STRIDE[4]
        in_state = in_v[:, None] & in_k[None, :]
        memory = tl.load(place, mask=in_state, other=0.0).to(tl.float32)
        first = (layer * P + row) * S
        record = first * H + head
        for _ in range(count):
            decay = tl.load(decays + record * K + k, mask=in_k, other=0.0)
            key = tl.load(keys + record * K + k, mask=in_k, other=0.0)
            delta = tl.load(deltas + record * V + v, mask=in_v, other=0.0)
            memory = tl.fma(delta[:, None], key[None, :], memory * decay[None, :])
            record += H
        tl.store(place, narrow(memory, state, INTERPRET), mask=in_state)
        if (N > 0) & (tile == 0):
            C: tl.constexpr = H * (2 * K + V)
            conv_row = conv_state + layer * CONV_STRIDE[0] + row * CONV_STRIDE[1]
            input_row = inputs + first * C
            own_v = tl.arange(0, TILE_V * TILES)
            q_channel = (head * K + k).to(tl.int64)
            k_channel = q_channel + H * K
            v_channel = (2 * H * K + head * V + own_v).to(tl.int64)
            new_q = moved_columns(conv_row, input_row, q_channel, in_k, count, C, CONV_STRIDE, N, BLOCK_N)
            new_k = moved_columns(conv_row, input_row, k_channel, in_k, count, C, CONV_STRIDE, N, BLOCK_N)
            new_v = moved_columns(conv_row, input_row, v_channel, own_v < V, count, C, CONV_STRIDE, N, BLOCK_N)
            # Columns move between threads: all of them are read before any is written.
            tl.debug_barrier()
            store_moved(conv_row, new_q, q_channel, in_k, CONV_STRIDE, N, BLOCK_N)
            store_moved(conv_row, new_k, k_channel, in_k, CONV_STRIDE, N, BLOCK_N)
            store_moved(conv_row, new_v, v_channel, own_v < V, CONV_STRIDE, N, BLOCK_N)


def launch(state, conv_state, keys, decays, deltas, inputs, accepted, *, memory=torch):
    """The operator's tensors in schema order; ``state`` and ``conv_state`` change in place."""
    constants = {**CONSTANTS["kda_replay"], "INTERPRET": INTERPRET}
    kda_replay[CONSTANTS["grid"]](
        state, conv_state, keys, decays, deltas, inputs, accepted, **constants, **CONSTANTS["options"]
    )
