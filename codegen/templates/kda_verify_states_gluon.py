# pyright: basic, reportIndexIssue=false
# Kernel text: inside @gluon.jit, names are tensors and constants of a language whose types say little to a checker.
"""A few tokens of KDA in one launch, the state behind each apart: the form for heads of 128 on NVIDIA GPUs."""

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
    states,
    inputs,
    out_gate=None,
    norm_weight=None,
    *,
    memory=torch,
):
    """The operator's tensors in schema order -> [B, S, H, V]; ``states`` and ``inputs`` are written."""
    out = memory.empty(CONSTANTS["out"], dtype=qkv.dtype, device=qkv.device)
    kda_verify_step[CONSTANTS["grid"]](
        qkv, conv_weight, conv_state, gate, dt_bias, a_log, beta, state, out_gate, norm_weight, out,
        None, None, None, inputs, states,
        **CONSTANTS["kda_verify_step"], **CONSTANTS["options"],
    )  # fmt: skip
    return out
