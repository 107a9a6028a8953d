"""Reference of ``kimigraph::attention_residual``."""

from collections.abc import Sequence

import torch


def attention_residual(
    sources: Sequence[torch.Tensor],
    query: torch.Tensor,
    norm_weight: torch.Tensor | None = None,
    out_norm_weight: torch.Tensor | None = None,
    *,
    eps: float,
    out_eps: float = 1e-5,
) -> torch.Tensor:
    """See ``kimigraph.ir.operators.attention_residual``: one softmax over all sources in fp32."""
    values = torch.stack([source.float() for source in sources])
    effective = query.float().reshape(-1)
    if norm_weight is not None:
        effective = effective * norm_weight.float()
    logits = (values * effective).sum(-1) * torch.rsqrt(values.square().mean(-1) + eps)
    mixed = (torch.softmax(logits, dim=0).unsqueeze(-1) * values).sum(0)
    if out_norm_weight is not None:
        mixed = mixed * torch.rsqrt(mixed.square().mean(-1, keepdim=True) + out_eps) * out_norm_weight.float()
    return mixed.to(sources[0].dtype)
