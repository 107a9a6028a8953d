# pyright: basic
# Reason: fla carries no types.
"""flash-linear-attention's chunked prefill. The first call of a head count tunes its kernels, for minutes."""

from importlib import import_module
from typing import Any

import torch

from kimigraph.bench.peers import Prepared
from kimigraph.bench.peers.fla import require

TITLE = "fla chunk_kda"
ON_DEVICE = ("prefill",)  # its host part looks at cu_seqlens and picks kernels


def prefill(given: dict[str, Any], attributes: dict[str, Any]) -> tuple[Prepared, dict[str, torch.Tensor]]:
    """``chunk_kda`` with gate, norms and strength inside."""
    require()
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
