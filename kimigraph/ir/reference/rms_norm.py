"""Reference of ``kimigraph::rms_norm``."""

import torch


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    *,
    eps: float,
    rounds_first: bool = False,
) -> torch.Tensor:
    """See ``kimigraph.ir.operators.rms_norm``: fp32 inside, the sum with the residual rounded to the type of ``x``."""
    total = x if residual is None else x + residual
    wide = total.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if rounds_first:
        normed = normed.to(x.dtype).float()
    if weight is not None:
        normed = normed * weight.float()
    return normed.to(x.dtype)
