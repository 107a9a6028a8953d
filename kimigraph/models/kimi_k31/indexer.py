"""The Lightning Indexer of a DSA layer: which cached tokens each query attends to.

Source: DeepSeek-V3.2-Exp. Here on the query latent of a NoPE model; ``index_rope`` says whether index keys carry a
position.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kimigraph.models.kimi_k31.cache import Positions
from kimigraph.models.kimi_k31.configuration import KimiK31Config

KEY_NORM_EPS = 1e-6


class Indexer(nn.Module):
    """Scores ``sum_h w[h] * relu(q[h] . key)`` in fp32 over the whole cache, and the top ``index_topk`` of them."""

    def __init__(self, config: KimiK31Config) -> None:
        super().__init__()
        dtype = config.torch_dtype
        self.heads = config.index_n_heads
        self.head_dim = config.index_head_dim
        self.topk = config.index_topk
        self.rope_style = config.index_rope
        self.rope_dim = config.qk_rope_head_dim
        self.rope_theta = config.rope_theta
        self.wq_b = nn.Linear(config.q_lora_rank, self.heads * self.head_dim, bias=False, dtype=dtype)
        self.wk = nn.Linear(config.hidden_size, self.head_dim, bias=False, dtype=dtype)
        self.k_norm = nn.LayerNorm(self.head_dim, eps=KEY_NORM_EPS, dtype=dtype)
        self.weights_proj = nn.Linear(config.hidden_size, self.heads, bias=False, dtype=torch.float32)

    def forward(self, x: Tensor, query_latent: Tensor, positions: Positions, key_cache: Tensor) -> Tensor:
        """Write the new keys into ``key_cache`` [B, T, D], in place, and pick cache slots for each token.

        ``x`` [B, S, d] and ``query_latent`` [B, S, q_lora_rank]. Returns int64 [B, S, min(index_topk, T)]; where fewer
        slots are visible, the rest of a row names invisible ones, so the caller intersects with causality.
        """
        batch, tokens, _ = x.shape
        q = self.wq_b(query_latent).view(batch, tokens, self.heads, self.head_dim)
        key = self.k_norm(self.wk(x))
        if self.rope_style != "none":
            angles = rope_angles(positions.columns, self.rope_dim, self.rope_theta)
            q = rotate(q, angles.unsqueeze(2), self.rope_style)
            key = rotate(key, angles, self.rope_style)
        keys = positions.write(key_cache, key)

        dots = torch.matmul(q.float(), keys.float().transpose(-1, -2).unsqueeze(1))
        weights = self.weights_proj(x.float()) * (self.heads**-0.5 * self.head_dim**-0.5)
        scores = torch.matmul(weights.unsqueeze(-2), F.relu(dots)).squeeze(-2)
        scores = scores.masked_fill(~positions.visible, float("-inf"))
        return scores.topk(min(self.topk, scores.shape[-1]), dim=-1).indices


def rope_angles(positions: Tensor, rope_dim: int, theta: float) -> Tensor:
    """Rotation angles fp32 [B, S, rope_dim / 2] of ``positions`` [B, S]."""
    exponents = torch.arange(0, rope_dim, 2, device=positions.device, dtype=torch.float32) / rope_dim
    return positions.unsqueeze(-1).float() * theta**-exponents


def rotate(x: Tensor, angles: Tensor, style: str) -> Tensor:
    """Rotate the first dims of ``x`` by ``angles`` (broadcast, half as many): pairs (i, i + half) or (2i, 2i + 1)."""
    turned, rest = x[..., : 2 * angles.shape[-1]].float(), x[..., 2 * angles.shape[-1] :]
    cos, sin = angles.cos(), angles.sin()
    if style == "half_split":
        first, second = turned.chunk(2, dim=-1)
        turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    else:
        first, second = turned[..., 0::2], turned[..., 1::2]
        turned = torch.stack([first * cos - second * sin, second * cos + first * sin], dim=-1).flatten(-2)
    return torch.cat([turned.to(x.dtype), rest], dim=-1)
