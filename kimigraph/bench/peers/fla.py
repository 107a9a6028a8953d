# pyright: basic
# Reason: fla carries no types.
"""flash-linear-attention: for a decode step three Triton launches, for prefill its chunked kernels."""

import importlib.util
from importlib import import_module
from typing import Any

import torch

from kimigraph.bench.peers import PeerUnavailableError, Prepared

TITLE = "fla"


def _require() -> None:
    if importlib.util.find_spec("fla") is None:
        raise PeerUnavailableError("fla not found: install fla-core")


def decode(given: dict[str, torch.Tensor], attributes: dict[str, Any]) -> tuple[Prepared, dict[str, torch.Tensor]]:
    """Convolution, recurrence with gate and norms inside, gated norm; states of its own, updated in place."""
    _require()
    causal_conv1d_update = import_module("fla.modules.causal_conv1d.ops").causal_conv1d_update
    layer_norm_gated_fwd = import_module("fla.modules.norm.fused_norm_gate").layer_norm_gated_fwd
    fused_recurrent_kda_fwd = import_module("fla.ops.kda.fused_recurrent").fused_recurrent_kda_fwd

    batch, heads, side, _ = given["state"].shape
    # fla keeps the current input in its history as well, and writes no other column than the last three.
    history = torch.nn.functional.pad(given["conv_state"], (1, 0)).contiguous()
    written = {"state": given["state"].clone(), "conv_state": history[..., 1:]}
    per_head = (batch, 1, heads, side)
    bias = given["dt_bias"].view(heads, side)

    def call() -> torch.Tensor:
        mixed, _ = causal_conv1d_update(given["qkv"][:, 0], history, weight=given["conv_weight"], activation="silu")
        q, k, v = (part.view(per_head) for part in mixed.view(batch, 3, -1).transpose(0, 1).contiguous())
        out, _ = fused_recurrent_kda_fwd(
            q, k, v, given["gate"].view(per_head), given["beta"], given["a_log"], bias, written["state"],
            attributes["scale"], state_v_first=True, use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True,
            use_beta_sigmoid_in_kernel=True, lower_bound=attributes["lower_bound"], out=torch.empty_like(v),
        )  # fmt: skip
        result = layer_norm_gated_fwd(
            out.view(-1, side), given["out_gate"].view(-1, side), given["norm_weight"], None, activation="sigmoid",
            eps=attributes["norm_eps"], is_rms_norm=True,
        )[0]  # fmt: skip
        written["out"] = result.view(per_head)
        return result

    return call, written


def prefill(given: dict[str, Any], attributes: dict[str, Any]) -> tuple[Prepared, dict[str, torch.Tensor]]:
    """``chunk_kda`` with gate, norms and strength inside."""
    _require()
    chunk_kda = import_module("fla.ops.kda").chunk_kda

    written: dict[str, torch.Tensor] = {}

    def call() -> torch.Tensor:
        with torch.no_grad():
            written["out"], written["final_state"] = chunk_kda(
                given["q"], given["k"], given["v"], given["g"], given["beta"], scale=attributes["scale"],
                initial_state=given["initial_state"], output_final_state=True, use_qk_l2norm_in_kernel=True,
                use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, safe_gate=True,
                lower_bound=attributes["lower_bound"], A_log=given["a_log"], dt_bias=given["dt_bias"],
                state_v_first=True, cu_seqlens=given["cu_seqlens"],
            )  # fmt: skip
        return written["out"]

    return call, written
