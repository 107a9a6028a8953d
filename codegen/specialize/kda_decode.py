"""Shapes, strides and tiles of the KDA step, and of its forms that leave the states as they are."""

import math
from typing import Any, TypeVar

from kimigraph.codegen.kernel import KernelModule, KernelRequest, TensorSpec
from kimigraph.codegen.specialize.kda_strides import by_head, per_channel, per_head
from kimigraph.codegen.specialize.rendering import ahead_of_time, needed, padded, refuse, render

Value = TypeVar("Value")

MOST_STATE = 256 * 256  # fp32 state elements of one head: the register file of one SM
STATE_PER_WARP = 2048  # 64 registers a thread
GLUON_SIDE = 128
MOST_LOGGED = 16  # 24 KiB of records a program; the loop over them is unrolled
MOST_TOKENS = 9  # a token and eight drafts; the loop over tokens is unrolled
AHEAD = 4  # tokens whose inputs are loaded together; those of eight leave two programs an SM short of registers
RECORDS = ("keys", "decays", "deltas", "inputs", "states")
OF_PLAIN_STEPS = ("slots", "gate_weight")
GATE_CONSTANTS = ("GATE_WEIGHT_STRIDE", "RANK", "BLOCK_R")
SCHEDULES = (  # programs at most, parts of a state, streaming
    (132, 1, False),
    (1 << 31, 2, False),
)


def build(request: KernelRequest) -> KernelModule:
    """One program a head; CompileError where a head's state does not fit one."""
    names = ("qkv", "conv_weight", "conv_state", "gate", "dt_bias", "a_log", "beta", "state")
    qkv, taps, conv, gate, bias, rate, beta, state = (needed(request, name) for name in names)
    out_gate, norm, wide = (request.tensors.get(name) for name in ("out_gate", "norm_weight", "gate_weight"))
    records = {name: record(request, name) for name in RECORDS}
    filled = request.tensors.get("filled")
    attributes = request.attributes
    batch, tokens = qkv.shape[:2]
    heads = math.prod(rate.shape)
    key_axis, value_axis = (2, 3) if attributes["state_layout"] == "kv" else (3, 2)
    key_dim, value_dim = state.shape[key_axis], state.shape[value_axis]
    block_k, block_v = padded(key_dim), padded(value_dim)
    if block_k * block_v > MOST_STATE:
        raise refuse(
            request,
            f"a head's state of {key_dim} x {value_dim} exceeds a program",
            f"at most {MOST_STATE} elements fit",
        )
    lower_bound = attributes["lower_bound"]
    constants: dict[str, Any] = {
        "S": tokens,
        "L": 0 if filled is None else needed(request, "keys").shape[1],
        "H": heads,
        "K": key_dim,
        "V": value_dim,
        "W": taps.shape[-1],
        "N": conv.shape[-1],
        "SCALE": float(attributes["scale"]),
        "L2_EPS": float(attributes["l2_eps"]),
        "LOWER_BOUND": None if lower_bound is None else float(lower_bound),
        "NORM_EPS": float(attributes["norm_eps"]),
        "QKV_STRIDE": qkv.stride,
        "TAP_STRIDE": (taps.stride[0], taps.stride[-1]),
        "CONV_STRIDE": conv.stride,
        "GATE_STRIDE": by_head(gate, key_dim) if wide is None else (*gate.stride[:2], 0, gate.stride[2]),
        "GATE_WEIGHT_STRIDE": (0, 0) if wide is None else wide.stride,
        "RANK": gate.shape[-1],
        "BIAS_STRIDE": per_channel(request, bias, heads, key_dim),
        "RATE_STRIDE": per_head(request, rate),
        "BETA_STRIDE": beta.stride,
        "STATE_STRIDE": (state.stride[0], state.stride[1], state.stride[value_axis], state.stride[key_axis]),
        "OUT_GATE_STRIDE": (0, 0, 0, 0) if out_gate is None else by_head(out_gate, value_dim),
        "NORM_STRIDE": 0 if norm is None else norm.stride[-1],
        "BLOCK_K": block_k,
        "BLOCK_V": block_v,
        "BLOCK_N": padded(conv.shape[-1]),
        "BLOCK_R": padded(gate.shape[-1]),
        "INTERPRET": False,
    }
    operands: dict[str, TensorSpec | str | None] = {
        **dict(zip(names, (qkv, taps, conv, gate, bias, rate, beta, state), strict=True)),
        "out_gate": out_gate,
        "norm_weight": norm,
        "slots": request.tensors.get("slots"),
        "gate_weight": wide,
        "out": qkv.dtype,
        **records,
        "filled": filled,
    }
    keeps = records["keys"] is not None or records["inputs"] is not None
    launch = {"out": (batch, tokens, heads, value_dim), "grid": (batch * heads,)}
    if request.target.startswith("cuda") and fits_gluon(constants, logs=records["keys"] is not None and filled is None):
        return build_gluon(request.op, launch, operands, constants)
    options = {"num_warps": min(max(block_k * block_v // STATE_PER_WARP, 1), 16), "num_stages": 1}
    if tokens == 1 and options["num_warps"] == 8 and not keeps:
        # Two programs share an SM: one computes while the other waits for its state.
        options["maxnreg"] = 128
    text = render(request.op, {**launch, "kda_step": constants, "options": options})
    return KernelModule(text, (ahead_of_time("kda_step", operands, constants, options),))


def record(request: KernelRequest, name: str) -> TensorSpec | None:
    """A tensor that the kernel fills row by row; CompileError where its rows do not follow one another."""
    if request.tensors.get(name) is None:
        return None
    spec = needed(request, name)
    stride = 1
    for size, step in zip(reversed(spec.shape), reversed(spec.stride), strict=True):
        if size > 1 and step != stride:
            raise refuse(request, f"{name} has the strides {list(spec.stride)}", "give a contiguous tensor")
        stride *= size
    return spec


def fits_gluon(constants: dict[str, Any], logs: bool = False) -> bool:
    """Whether the form for heads of 128 serves the step: three columns of history, K innermost, a few tokens.

    A step that ``logs`` its tokens reads the states alone: either layout, and of a longer history the last columns.
    """
    fixed = {"K": GLUON_SIDE, "V": GLUON_SIDE, "W": 4}
    innermost, columns = constants["STATE_STRIDE"][3] == 1, constants["N"]
    fits = constants["S"] <= MOST_TOKENS and constants["L"] <= MOST_LOGGED
    fits = fits and (columns >= 3 if logs else innermost and columns == 3)
    return fits and all(constants[name] == value for name, value in fixed.items())


def build_gluon(
    op: str, launch: dict[str, Any], operands: dict[str, TensorSpec | str | None], constants: dict[str, Any]
) -> KernelModule:
    """The same step in the form for heads of 128; see ``parts_and_streaming``.

    Products and sums stay apart where the text does not join them: the compiler would join others in the step that
    verifies drafts than here, and its records would not be what this step adds to the state.
    """
    constants = without(constants, "K", "V", "W", "BLOCK_K", "BLOCK_V", "BLOCK_N", "INTERPRET")
    options: dict[str, Any] = {"num_warps": 8, "enable_fp_fusion": False}
    if operands["filled"] is not None:
        kernel = "kda_logged_step"
        operands = without(operands, *OF_PLAIN_STEPS, "inputs", "states")
        constants = without(constants, *GATE_CONSTANTS, "N", "S")
        constants["PADDED"] = padded(constants["L"])
        options["maxnreg"] = 128  # two programs share an SM
    elif operands["inputs"] is not None:
        kernel = "kda_verify_step"
        if operands["states"] is None:
            options["maxnreg"] = 128  # two programs share an SM; who writes states as well waits for memory alone
        operands = without(operands, *OF_PLAIN_STEPS, "filled")
        constants = without(constants, *GATE_CONSTANTS, "L") | {"PADDED": padded(constants["S"]), "GROUP": AHEAD}
    else:
        kernel = "kda_step"
        operands, constants = without(operands, *RECORDS, "filled"), without(constants, "L", "N")
        parts, stream = parts_and_streaming(launch["grid"][0]) if constants["S"] == 1 else (1, False)
        constants |= {"BLOCKS": parts, "STREAM": stream}
        if constants["S"] == 1:
            options["maxnreg"] = 128  # two programs share an SM
    text = render(f"{op}_gluon", {**launch, kernel: constants, "options": options})
    return KernelModule(text, (ahead_of_time(kernel, operands, constants, options),))


def without(values: dict[str, Value], *names: str) -> dict[str, Value]:
    """The other entries."""
    return {name: value for name, value in values.items() if name not in names}


def parts_and_streaming(programs: int) -> tuple[int, bool]:
    """Parts that a state is taken in, and whether it passes the L2 cache by: what was fastest on an H200.

    One part has all of a state in flight at once; two leave room for a second program on the multiprocessor.
    """
    for most, parts, stream in SCHEDULES:
        if programs <= most:
            return parts, stream
    return SCHEDULES[-1][1:]
