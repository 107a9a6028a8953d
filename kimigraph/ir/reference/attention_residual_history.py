"""Reference of ``kimigraph::attention_residual_history``."""

from collections.abc import Sequence

import torch


def attention_residual_history(
    sources: Sequence[torch.Tensor],
    queries: Sequence[torch.Tensor],
    norm_weights: Sequence[torch.Tensor],
    *,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``kimigraph.ir.operators.attention_residual_history``: one softmax for each query, in fp32."""
    values = torch.stack([source.float() for source in sources])
    scale = torch.rsqrt(values.square().mean(-1) + eps)
    mixtures: list[torch.Tensor] = []
    totals: list[torch.Tensor] = []
    for number, query in enumerate(queries):
        effective = query.float().reshape(-1)
        if norm_weights:
            effective = effective * norm_weights[number].float()
        logits = (values * effective).sum(-1) * scale
        mixtures.append((torch.softmax(logits, dim=0).unsqueeze(-1) * values).sum(0))
        totals.append(torch.logsumexp(logits, dim=0))
    return torch.stack(mixtures), torch.stack(totals)
