"""Shapes, strides and tiles of the fold of accepted tokens."""

from typing import Any

from kimigraph.codegen.kernel import KernelModule, KernelRequest, TensorSpec
from kimigraph.codegen.specialize.kda_decode import GLUON_SIDE, record
from kimigraph.codegen.specialize.rendering import ahead_of_time, needed, padded, refuse, render

TILE_STATE = 64 * 128  # elements of a program's part of a state: 64 registers a thread of 4 warps
STATE_PER_WARP = 2048
MOST_TOKENS = 16  # 20 KiB of records a program
MOST_ROWS = 65535  # programs along the second and the third side of a grid


def build(request: KernelRequest) -> KernelModule:
    """One launch for all layers; CompileError for records that are not contiguous, and for too many sequences."""
    state, conv, accepted = (needed(request, name) for name in ("state", "conv_state", "accepted"))
    records = {name: record(request, name) for name in ("keys", "decays", "deltas", "inputs")}
    keys = needed(request, "keys")
    layers, rows, tokens, heads, key_dim = keys.shape
    if max(layers, rows) > MOST_ROWS:
        raise refuse(request, f"{layers} layers of {rows} sequences", f"at most {MOST_ROWS} of each fit a launch")
    key_axis, value_axis = (3, 4) if request.attributes["state_layout"] == "kv" else (4, 3)
    value_dim = state.shape[value_axis]
    block_k, block_v = padded(key_dim), padded(value_dim)
    tile_v = min(block_v, padded(max(TILE_STATE // block_k, 1)))
    constants: dict[str, Any] = {
        "P": rows,
        "S": tokens,
        "H": heads,
        "K": key_dim,
        "V": value_dim,
        "N": conv.shape[-1],
        "STATE_STRIDE": (*state.stride[:3], state.stride[value_axis], state.stride[key_axis]),
        "CONV_STRIDE": conv.stride,
        "BLOCK_K": block_k,
        "TILE_V": tile_v,
        "TILES": block_v // tile_v,
        "BLOCK_N": padded(conv.shape[-1]),
        "INTERPRET": False,
    }
    operands: dict[str, TensorSpec | str | None] = {
        "state": state,
        "conv_state": conv,
        **records,
        "accepted": accepted,
    }
    options: dict[str, Any] = {"num_warps": min(max(block_k * tile_v // STATE_PER_WARP, 1), 8), "num_stages": 1}
    op = "kda_replay"
    if request.target.startswith("cuda") and fits_gluon(constants):
        op, constants["PADDED"], options = "kda_replay_gluon", padded(tokens), {"num_warps": 4}
        for name in ("K", "V", "BLOCK_K", "BLOCK_N", "TILES", "INTERPRET"):
            del constants[name]
    launch = {"grid": (heads * (block_v // tile_v), rows, layers)}
    text = render(op, {**launch, "kda_replay": constants, "options": options})
    return KernelModule(text, (ahead_of_time("kda_replay", operands, constants, options),))


def fits_gluon(constants: dict[str, Any]) -> bool:
    """Whether the form for heads of 128 serves the fold: K innermost, records that fit shared memory."""
    sides = constants["K"] == constants["V"] == GLUON_SIDE
    return sides and constants["STATE_STRIDE"][4] == 1 and constants["S"] <= MOST_TOKENS
