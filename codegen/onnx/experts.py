"""The routed experts without loops over what was chosen: ONNX shapes are known before the run."""

from typing import Any

import torch
from torch import Tensor

from kimigraph.ir.reference.moe_experts import choose_experts, gated


def gathered_experts(
    x: Tensor,
    logits: Tensor,
    bias: Tensor | None,
    gate_up: Tensor,
    down: Tensor,
    norm_weight: Tensor | None = None,
    up: Tensor | None = None,
    shared_gate: Tensor | None = None,
    shared_up: Tensor | None = None,
    shared_down: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    picks: int,
    renormalize: bool,
    scale: float = 1.0,
    groups: int = 1,
    group_picks: int = 1,
    eps: float = 1e-5,
    **activation: Any,
) -> tuple[Tensor, Tensor]:
    """``kimigraph::moe_experts`` with the weights of the chosen experts gathered, a copy for each token and pick."""
    form: dict[str, Any] = {"activation": "swiglu", "beta": 1.0, "linear_beta": None, "limit": None} | activation
    scores = torch.sigmoid(logits.float())
    chosen = choose_experts(scores if bias is None else scores + bias.float(), picks, groups, group_picks)
    weights = scores.gather(1, chosen)
    if renormalize:
        weights = weights / (weights.sum(1, keepdim=True) + 1e-20)
    rows = x.float().reshape(x.shape[0], 1, -1, 1)
    gate, linear = (gate_up[chosen].float() @ rows).squeeze(-1).chunk(2, dim=-1)
    hidden = gated(gate, linear, **form) * (weights * scale).unsqueeze(-1)
    out = (down[chosen].float() @ hidden.unsqueeze(-1)).squeeze(-1).sum(1)
    if norm_weight is not None:
        out = out * torch.rsqrt(out.square().mean(-1, keepdim=True) + eps) * norm_weight.float()
    if up is not None:
        out = out @ up.float().t()
    if shared_gate is not None and shared_up is not None and shared_down is not None:
        out = out + gated(shared_gate.float(), shared_up.float(), **form) @ shared_down.float().t()
    if residual is not None:
        out = out + residual.float()
    return out.to(x.dtype), chosen.to(torch.int32)
