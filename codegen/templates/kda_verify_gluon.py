# pyright: basic, reportIndexIssue=false
# Kernel text: inside @gluon.jit, names are tensors and constants of a language whose types say little to a checker.
"""A few tokens of KDA in one launch, recorded instead of written: the form for heads of 128 on NVIDIA GPUs."""

from typing import Any

import torch

from kimigraph.codegen.templates.kda_verify_step_gluon import kda_verify_step

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
    inputs,
    out_gate=None,
    norm_weight=None,
    *,
    memory=torch,
):
    """The operator's tensors in schema order -> [B, S, H, V]; the records are written, the states are not."""
    out = memory.empty(CONSTANTS["out"], dtype=qkv.dtype, device=qkv.device)
    kda_verify_step[CONSTANTS["grid"]](
        qkv, conv_weight, conv_state, gate, dt_bias, a_log, beta, state, out_gate, norm_weight, out,
        keys, decays, deltas, inputs, None,
        **CONSTANTS["kda_verify_step"], **CONSTANTS["options"],
    )  # fmt: skip
    return out
