# pyright: basic
# Kernel text: inside @triton.jit, names are tensors of a language that type checkers do not know.
"""The short convolution over a run of tokens; a program owns a tile of tokens and channels of one sequence."""

from typing import Any

import torch
import triton
import triton.language as tl
from triton import knobs

from kimigraph.codegen.templates.kda_gate import sigmoid
from kimigraph.codegen.templates.rounding import narrow

INTERPRET = knobs.runtime.interpret
CONSTANTS: dict[str, Any] = {}


@triton.jit
def earlier_input(
    x_row,
    state_row,
    at,
    channel,
    inside,
    S: tl.constexpr,
    N: tl.constexpr,
    X_STRIDE: tl.constexpr,
    STATE_STRIDE: tl.constexpr,
):
    """The input at token ``at``; one before the run is the state's, or zero without a state."""
    place = x_row + at.to(tl.int64) * X_STRIDE[1] + channel * X_STRIDE[2]
    value = tl.load(place, mask=inside & (at >= 0) & (at < S), other=0.0).to(tl.float32)
    if state_row is not None:
        place = state_row + channel * STATE_STRIDE[1] + (N + at) * STATE_STRIDE[2]
        old = tl.load(place, mask=inside & (at < 0), other=0.0).to(tl.float32)
        value = tl.where(at < 0, old, value)
    return value


@triton.jit
def convolve(
    x,
    weight,
    initial_state,
    out,
    final_state,
    S: tl.constexpr,
    C: tl.constexpr,
    W: tl.constexpr,
    N: tl.constexpr,
    ACTIVATION: tl.constexpr,
    X_STRIDE: tl.constexpr,
    TAP_STRIDE: tl.constexpr,
    STATE_STRIDE: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_W: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """SiLU of the causal depthwise convolution; the program of the first tokens also writes the last inputs."""
    tile = tl.program_id(1)
    sequence = tl.program_id(2).to(tl.int64)
    flat = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    channel = flat.to(tl.int64)[None, :]
    in_c = (flat < C)[None, :]
    x_row = x + sequence * X_STRIDE[0]
    state_row = None if initial_state is None else initial_state + sequence * STATE_STRIDE[0]
    token = (tile * BLOCK_S + tl.arange(0, BLOCK_S))[:, None]
    inside = in_c & (token < S)
    mixed = tl.zeros([BLOCK_S, BLOCK_C], tl.float32)
    for time in tl.static_range(W - 1, -1, -1):
        value = earlier_input(x_row, state_row, token - time, channel, inside, S, N, X_STRIDE, STATE_STRIDE)
        tap = tl.load(weight + channel * TAP_STRIDE[0] + (W - 1 - time) * TAP_STRIDE[1], mask=in_c, other=0.0)
        mixed += value * tap.to(tl.float32)
    if ACTIVATION:
        mixed = mixed * sigmoid(mixed)
    place = out + (sequence * S + token) * C + channel
    tl.store(place, narrow(mixed, out, INTERPRET), mask=inside)
    if W > 1 and tile == 0:
        column = tl.arange(0, BLOCK_W)[:, None]
        kept = in_c & (column < W - 1)
        last = earlier_input(x_row, state_row, S - (W - 1) + column, channel, kept, S, N, X_STRIDE, STATE_STRIDE)
        last_place = final_state + (sequence * C + channel) * (W - 1) + column
        tl.store(last_place, narrow(last, final_state, INTERPRET), mask=kept)


def launch(x, weight, initial_state=None, *, memory=torch):
    """The operator's tensors in schema order -> (y [B, S, C], final_state [B, C, W - 1])."""
    out = memory.empty(CONSTANTS["out"], dtype=x.dtype, device=x.device)
    state_type = x.dtype if initial_state is None else initial_state.dtype
    final_state = memory.empty(CONSTANTS["final_state"], dtype=state_type, device=x.device)
    convolve[CONSTANTS["grid"]](
        x, weight, initial_state, out, final_state,
        **{**CONSTANTS["convolve"], "INTERPRET": INTERPRET}, **CONSTANTS["options"],
    )  # fmt: skip
    return out, final_state
