# pyright: basic
# Kernel text: inside @triton.jit, names are tensors of a language that type checkers do not know.
"""One KDA step with its neighbours in one launch: the form for any size, type and device."""

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
    out_gate=None,
    norm_weight=None,
    slots=None,
    gate_weight=None,
    *,
    memory=torch,
):
    """The operator's tensors in schema order -> [B, S, H, V]; ``conv_state`` and ``state`` change in place."""
    slots = None if slots is None else slots.contiguous()  # a column of a table comes with the table's stride
    out = memory.empty(CONSTANTS["out"], dtype=qkv.dtype, device=qkv.device)
    constants = {**CONSTANTS["kda_step"], "INTERPRET": INTERPRET}
    kda_step[CONSTANTS["grid"]](
        qkv, conv_weight, conv_state, gate, dt_bias, a_log, beta, state, out_gate, norm_weight, slots,
        gate_weight, out, None, None, None, None, None, None,
        **constants, **CONSTANTS["options"],
    )  # fmt: skip
    return out
