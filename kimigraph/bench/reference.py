"""KDA in fp64, token by token: what both sides of a comparison are held against."""

import torch
import torch.nn.functional as F
from torch import Tensor


def unit(x: Tensor) -> Tensor:
    """``x / sqrt(sum(x^2) + 1e-6)`` over the last dim."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def log_decay(logit: Tensor, a_log: Tensor, dt_bias: Tensor, lower_bound: float) -> Tensor:
    """The bounded gate of logits [..., H, K]; ``a_log`` [H], ``dt_bias`` [H, K]."""
    return lower_bound * torch.sigmoid(a_log.exp().unsqueeze(-1) * (logit + dt_bias))


def delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Read-outs [T, H, V] and the last state of one sequence: ``q``, ``k``, ``g`` [T, H, K], ``state`` [H, V, K].

    ``q`` and ``k`` are normalised here and ``q`` scaled; ``g`` is the log-decay, ``beta`` [T, H] the strength.
    """
    q, k, decay = unit(q) * q.shape[-1] ** -0.5, unit(k), g.exp()
    out = torch.empty_like(v)
    for token in range(q.shape[0]):
        state = state * decay[token].unsqueeze(-2)
        delta = beta[token].unsqueeze(-1) * (v[token] - torch.einsum("hvk,hk->hv", state, k[token]))
        state = state + delta.unsqueeze(-1) * k[token].unsqueeze(-2)
        out[token] = torch.einsum("hvk,hk->hv", state, q[token])
    return out, state


def convolved(x: Tensor, taps: Tensor, history: Tensor) -> tuple[Tensor, Tensor]:
    """SiLU of one step of the short convolution, and the new history: ``x`` [B, C], ``history`` [B, C, W - 1]."""
    window = torch.cat([history, x.unsqueeze(-1)], dim=-1)
    return F.silu((window * taps).sum(-1)), window[..., 1:]


def gated_norm(out: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dim, its weight, then the output gate."""
    return out * torch.rsqrt(out.square().mean(-1, keepdim=True) + eps) * weight * torch.sigmoid(gate)
