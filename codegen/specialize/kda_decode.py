"""Shapes, strides and tiles of the KDA step."""

import math
from typing import Any

from kimigraph.codegen.kernel import KernelModule, KernelRequest, TensorSpec
from kimigraph.codegen.specialize.rendering import ahead_of_time, needed, padded, refuse, render

MOST_STATE = 256 * 256  # fp32 state elements of one head: the register file of one SM
STATE_PER_WARP = 2048  # 64 registers a thread


def build(request: KernelRequest) -> KernelModule:
    """One program a head; CompileError where a head's state does not fit one."""
    names = ("qkv", "conv_weight", "conv_state", "gate", "dt_bias", "a_log", "beta", "state")
    qkv, taps, conv, gate, bias, rate, beta, state = (needed(request, name) for name in names)
    out_gate, norm = request.tensors.get("out_gate"), request.tensors.get("norm_weight")
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
        "GATE_STRIDE": by_head(gate, key_dim),
        "BIAS_STRIDE": per_channel(request, bias, heads, key_dim),
        "RATE_STRIDE": per_head(request, rate),
        "BETA_STRIDE": beta.stride,
        "STATE_STRIDE": (state.stride[0], state.stride[1], state.stride[value_axis], state.stride[key_axis]),
        "OUT_GATE_STRIDE": (0, 0, 0, 0) if out_gate is None else by_head(out_gate, value_dim),
        "NORM_STRIDE": 0 if norm is None else norm.stride[-1],
        "BLOCK_K": block_k,
        "BLOCK_V": block_v,
        "BLOCK_N": padded(conv.shape[-1]),
        "INTERPRET": False,
    }
    options = {"num_warps": min(max(block_k * block_v // STATE_PER_WARP, 1), 16), "num_stages": 1}
    if tokens == 1 and options["num_warps"] == 8:
        # Two programs share an SM: one computes while the other waits for its state.
        options["maxnreg"] = 128
    text = render(
        "kda_decode",
        {"out": (batch, tokens, heads, value_dim), "grid": (batch * heads,), "kda_step": constants, "options": options},
    )
    operands: dict[str, TensorSpec | str | None] = {
        **dict(zip(names, (qkv, taps, conv, gate, bias, rate, beta, state), strict=True)),
        "out_gate": out_gate,
        "norm_weight": norm,
        "out": qkv.dtype,
    }
    return KernelModule(text, (ahead_of_time("kda_step", operands, constants, options),))


def by_head(spec: TensorSpec, width: int) -> tuple[int, ...]:
    """Strides (sequence, token, head, channel) of ``[B, S, H * width]`` or ``[B, S, H, width]``."""
    if len(spec.shape) == 4:
        return spec.stride
    return (spec.stride[0], spec.stride[1], width * spec.stride[2], spec.stride[2])


def per_channel(request: KernelRequest, spec: TensorSpec, heads: int, width: int) -> tuple[int, int]:
    """Strides (head, channel) of ``[H * width]``, ``[H, width]`` or either with leading ones."""
    axes = [(size, stride) for size, stride in zip(spec.shape, spec.stride, strict=True) if size > 1]
    if [size for size, _ in axes] == [heads, width]:
        return axes[0][1], axes[1][1]
    if len(axes) == 1:
        return (width * axes[0][1], axes[0][1])
    if not axes:
        return (0, 0)
    raise refuse(request, f"dt_bias has the shape {list(spec.shape)}", f"want [{heads * width}] or [{heads}, {width}]")


def per_head(request: KernelRequest, spec: TensorSpec) -> int:
    """Stride along the one axis of ``a_log`` that is not 1."""
    strides = [stride for size, stride in zip(spec.shape, spec.stride, strict=True) if size > 1]
    if len(strides) > 1:
        raise refuse(request, f"a_log has the shape {list(spec.shape)}", "want one axis of heads, others 1")
    return strides[0] if strides else 0
