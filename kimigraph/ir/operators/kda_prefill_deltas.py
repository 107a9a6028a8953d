"""``kda_prefill_deltas``: ``kda_prefill`` that also hands out the corrected deltas, which replay needs.

The formulas, and what the operands mean, are those of ``kda_prefill``. Per token and head

    u = beta * (v - S^T k), with S the decayed state before the token

so that from any state S_0, S_c = diag(exp(G_c)) S_0 + sum_j diag(exp(G_c - G_j)) k_j u_j^T with G the cumulated
log-decays and k the normalised keys.

Shapes: ``q``, ``k``, ``g`` [B, T, H, K]; ``v`` [B, T, H, V]; ``beta`` [B, T, H]; ``initial_state`` in ``state_layout``,
or None; ``a_log`` (H elements) and ``dt_bias`` (H*K elements) when ``g`` and ``beta`` are raw; ``cu_seqlens`` [N + 1]
for packed sequences; ``scale``, ``l2_norm``, ``l2_eps`` and ``lower_bound`` as there. Returns ``out`` and
``final_state`` as ``kda_prefill`` does, and ``deltas`` fp32 [B, T, H, V], every u.

Source: Kimi Linear technical report. Errors: those of ``kda_prefill``.
"""

from typing import Any

import torch

from kimigraph.ir.operators import kda_prefill
from kimigraph.ir.operators.registry import Cost, Operator, register
from kimigraph.ir.reference.kda_prefill_deltas import kda_prefill_deltas

_NAME = "kda_prefill_deltas"


def _fake(
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
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    out, final_state = kda_prefill.fake(
        q, k, v, g, beta, initial_state, a_log, dt_bias, cu_seqlens,
        scale=scale, l2_norm=l2_norm, l2_eps=l2_eps, lower_bound=lower_bound, state_layout=state_layout,
    )  # fmt: skip
    return out, final_state, v.new_empty(v.shape, dtype=torch.float32)


def _cost(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *others: Any, **attributes: Any) -> Cost:
    alone = kda_prefill.cost(q, k, v, *others, **attributes)
    return Cost(alone.bytes + 4 * v.numel(), alone.flops)


OPERATOR = register(
    Operator(
        name=_NAME,
        signature=f"{kda_prefill.OPERANDS} -> (Tensor, Tensor, Tensor)",
        summary="the gated delta rule over runs of tokens, with the corrected deltas",
        documentation=__doc__,
        reference=kda_prefill_deltas,
        fake=_fake,
        cost=_cost,
    )
)
