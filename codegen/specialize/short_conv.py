"""Shapes, strides and tiles of the short convolution over a run of tokens."""

from typing import Any

from kimigraph.codegen.kernel import KernelModule, KernelRequest
from kimigraph.codegen.specialize.rendering import ahead_of_time, ceil_div, needed, padded, render

TILE = (16, 256)  # tokens and channels: the rows before a tile are read twice, so a tile is several times W


def build(request: KernelRequest) -> KernelModule:
    """One launch for ``[B, S, C]`` inputs and any width."""
    x, weight = needed(request, "x"), needed(request, "weight")
    state = request.tensors.get("initial_state")
    batch, tokens, channels = x.shape
    width = weight.shape[-1]
    block_s, block_c = min(padded(tokens), TILE[0]), min(padded(channels), TILE[1])
    constants: dict[str, Any] = {
        "S": tokens,
        "C": channels,
        "W": width,
        "N": 0 if state is None else state.shape[-1],
        "ACTIVATION": bool(request.attributes["activation"]),
        "X_STRIDE": x.stride,
        "TAP_STRIDE": (weight.stride[0], weight.stride[-1]),
        "STATE_STRIDE": (0, 0, 0) if state is None else state.stride,
        "BLOCK_S": block_s,
        "BLOCK_C": block_c,
        "BLOCK_W": padded(width - 1),
        "INTERPRET": False,
    }
    options = {"num_warps": 4, "num_stages": 1}
    text = render(
        "short_conv",
        {
            "out": (batch, tokens, channels),
            "final_state": (batch, channels, width - 1),
            # No token at all still has a state to hand on.
            "grid": (ceil_div(channels, block_c), max(ceil_div(tokens, block_s), 1), batch),
            "convolve": constants,
            "options": options,
        },
    )
    state_type = x.dtype if state is None else state.dtype
    operands = {"x": x, "weight": weight, "initial_state": state, "out": x.dtype, "final_state": state_type}
    return KernelModule(text, (ahead_of_time("convolve", operands, constants, options),))
