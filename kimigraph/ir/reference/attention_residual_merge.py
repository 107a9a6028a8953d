"""Reference of ``kimigraph::attention_residual_merge``."""

import torch


def attention_residual_merge(
    history: torch.Tensor,
    lse: torch.Tensor,
    partial: torch.Tensor,
    query: torch.Tensor,
    norm_weight: torch.Tensor | None = None,
    out_norm_weight: torch.Tensor | None = None,
    *,
    eps: float,
    out_eps: float = 1e-5,
) -> torch.Tensor:
    """See ``kimigraph.ir.operators.attention_residual_merge``: a softmax over two, in fp32."""
    value = partial.float()
    effective = query.float().reshape(-1)
    if norm_weight is not None:
        effective = effective * norm_weight.float()
    logit = (value * effective).sum(-1) * torch.rsqrt(value.square().mean(-1) + eps)
    share = torch.sigmoid(logit - lse.float()).unsqueeze(-1)
    mixed = (1 - share) * history.float() + share * value
    if out_norm_weight is not None:
        mixed = mixed * torch.rsqrt(mixed.square().mean(-1, keepdim=True) + out_eps) * out_norm_weight.float()
    return mixed.to(partial.dtype)
