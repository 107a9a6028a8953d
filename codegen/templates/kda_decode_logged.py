# pyright: basic
# Kernel text: inside @triton.jit, names are tensors of a language that type checkers do not know.
"""One KDA step that leaves the state where it is until its log is full: the form for any size, type and device."""

from typing import Any

import torch
from triton import knobs

from kimigraph.codegen.templates.kda_step import kda_step

INTERPRET = knobs.runtime.interpret
CONSTANTS: dict[str, Any] = {}


def launch(
    qkv,
    conv_weight,
    conv_state,
    gate,
    dt_bias,
    a_log,
    beta,
    state,
    keys,
    decays,
    deltas,
    filled,
    out_gate=None,
    norm_weight=None,
    *,
    memory=torch,
):
    """The operator's tensors in schema order -> [B, 1, H, V]; states and records change in place."""
    out = memory.empty(CONSTANTS["out"], dtype=qkv.dtype, device=qkv.device)
    constants = {**CONSTANTS["kda_step"], "INTERPRET": INTERPRET}
    kda_step[CONSTANTS["grid"]](
        qkv, conv_weight, conv_state, gate, dt_bias, a_log, beta, state, out_gate, norm_weight, None, None, out,
        keys, decays, deltas, None, None, filled,
        **constants, **CONSTANTS["options"],
    )  # fmt: skip
    return out
