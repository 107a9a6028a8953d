# pyright: basic
# Reason: fla carries no types.
"""flash-linear-attention's decode step: three Triton launches. ``fla_chunk`` has its prefill."""

import importlib.util
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import torch

from kimigraph.bench.peers import PeerUnavailableError, Prepared

TITLE = "fla"


def require() -> None:
    """PeerUnavailableError without the library."""
    if importlib.util.find_spec("fla") is None:
        raise PeerUnavailableError("fla not found: install fla-core")


def decode(given: dict[str, torch.Tensor], attributes: dict[str, Any]) -> tuple[Prepared, dict[str, torch.Tensor]]:
    """Convolution, recurrence with gate and norms inside, gated norm; states of its own, updated in place."""
    require()
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


def residual(given: Sequence[dict[str, Any]], eps: float) -> list[Prepared]:
    """``fused_attnres`` with the norm behind it; tuned for this shape alone."""
    require()
    fused = import_module("fla.ops.attnres.fused")
    cache = getattr(fused.attnres_fwd_kernel, "cache", None)
    if isinstance(cache, dict):
        cache.clear()  # its key knows the width and the sources, not the tokens

    def call(one: dict[str, Any]) -> torch.Tensor:
        with torch.no_grad():
            return fused.fused_attnres(
                one["query"], one["sources"], one["norm_weight"], output_rms_weight=one["out_norm_weight"], rms_eps=eps
            )

    return [lambda one=one: call(one) for one in given]
