"""RMS norms, computed in fp32 with one rounding at the end."""

import torch
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """``x * rsqrt(mean(x^2) + eps) * weight`` over the last dim; returns the type of ``x``."""

    def __init__(self, width: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, dtype=dtype))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """``x`` [.., width], any floating type."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * self.weight.float()).to(x.dtype)


class GatedRMSNorm(nn.Module):
    """RMSNorm over the last dim, then ``* sigmoid(gate)``: the gate comes after the norm. The weight is fp32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, dtype=torch.float32))
        self.eps = eps

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """``x`` and ``gate`` of the same shape; returns the type of ``gate``."""
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps) * self.weight
        return (normed * torch.sigmoid(gate.float())).to(gate.dtype)
