"""Reference of ``kimigraph::kda_prefill``."""

import torch

from kimigraph.ir.reference.kda_prefill_deltas import kda_prefill_deltas


def kda_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None = None,
    a_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    *,
    scale: float,
    l2_norm: bool,
    l2_eps: float = 1e-6,
    lower_bound: float | None = None,
    state_layout: str = "kv",
) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``kimigraph.ir.operators.kda_prefill``: the recurrence without the corrected deltas."""
    out, final_state, _ = kda_prefill_deltas(
        q, k, v, g, beta, initial_state, a_log, dt_bias, cu_seqlens,
        scale=scale, l2_norm=l2_norm, l2_eps=l2_eps, lower_bound=lower_bound, state_layout=state_layout,
    )  # fmt: skip
    return out, final_state
