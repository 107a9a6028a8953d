"""Gated multi-head latent attention without rotary positions, over all slots or those that an indexer picks.

Source: the Kimi K3 technical report (the gate, no positions), DeepSeek-V3.2-Exp (the sparsity). As in public code the
keys are expanded over the whole cache and the picks become a mask; making it sparse is the compiler's work.
"""

import torch
from torch import Tensor, nn

from kimigraph.models.kimi_k31.cache import Positions
from kimigraph.models.kimi_k31.configuration import KimiConfig, KimiK31Config
from kimigraph.models.kimi_k31.indexer import Indexer
from kimigraph.models.kimi_k31.normalization import RMSNorm


class LatentAttention(nn.Module):
    """One MLA layer: sparse (DSA) in K3.1, dense in K3. A query has ``qk_nope_head_dim`` dims for its own head's keys,
    then the shared."""

    def __init__(self, config: KimiConfig) -> None:
        super().__init__()
        dtype, hidden, eps = config.torch_dtype, config.hidden_size, config.rms_norm_eps
        self.heads = config.num_attention_heads
        self.nope_dim = config.qk_nope_head_dim
        self.rope_dim = config.qk_rope_head_dim
        self.value_dim = config.v_head_dim
        self.latent_dim = config.kv_lora_rank
        self.scale = config.qk_head_dim**-0.5
        self.q_a_proj = nn.Linear(hidden, config.q_lora_rank, bias=False, dtype=dtype)
        self.q_a_layernorm = RMSNorm(config.q_lora_rank, eps, dtype)
        self.q_b_proj = nn.Linear(config.q_lora_rank, self.heads * config.qk_head_dim, bias=False, dtype=dtype)
        self.kv_a_proj_with_mqa = nn.Linear(hidden, self.latent_dim + self.rope_dim, bias=False, dtype=dtype)
        self.kv_a_layernorm = RMSNorm(self.latent_dim, eps, dtype)
        expanded = self.heads * (self.nope_dim + self.value_dim)
        self.kv_b_proj = nn.Linear(self.latent_dim, expanded, bias=False, dtype=dtype)
        self.g_proj = None
        if config.mla_use_output_gate:
            self.g_proj = nn.Linear(hidden, self.heads * self.value_dim, bias=False, dtype=dtype)
        self.o_proj = nn.Linear(self.heads * self.value_dim, hidden, bias=False, dtype=dtype)
        self.indexer = Indexer(config) if isinstance(config, KimiK31Config) else None

    def forward(
        self,
        x: Tensor,
        positions: Positions,
        latent_cache: Tensor,
        rope_cache: Tensor,
        index_keys: Tensor | None = None,
    ) -> Tensor:
        """``x`` [B, S, d]; the caches [B, T, .] (index keys where there is an indexer) take the new tokens in place.

        Returns [B, S, d].
        """
        query_latent = self.q_a_layernorm(self.q_a_proj(x))
        q = self.q_b_proj(query_latent).unflatten(-1, (self.heads, -1)).transpose(1, 2)

        latent, rope = self.kv_a_proj_with_mqa(x).split([self.latent_dim, self.rope_dim], dim=-1)
        latents = positions.write(latent_cache, self.kv_a_layernorm(latent))
        ropes = positions.write(rope_cache, rope)
        keys, values = self.expand(latents, ropes)

        seen = positions.visible
        if self.indexer is not None:
            picks = self.indexer(x, query_latent, positions, index_keys)
            seen = torch.zeros_like(seen).scatter(-1, picks, True) & seen
        hidden = ~seen.unsqueeze(1)

        scores = torch.matmul(q, keys.transpose(-1, -2)) * self.scale
        weights = torch.softmax(scores.float().masked_fill(hidden, float("-inf")), dim=-1)
        out = torch.matmul(weights.to(values.dtype), values).transpose(1, 2).flatten(2)
        if self.g_proj is not None:
            out = out * torch.sigmoid(self.g_proj(x))
        return self.o_proj(out)

    def expand(self, latents: Tensor, ropes: Tensor) -> tuple[Tensor, Tensor]:
        """Keys [B, H, T, qk_head_dim] and values [B, H, T, v_head_dim] of the cached latents [B, T, .]."""
        batch, context, _ = latents.shape
        heads = self.kv_b_proj(latents).view(batch, context, self.heads, self.nope_dim + self.value_dim)
        keys, values = heads.transpose(1, 2).split([self.nope_dim, self.value_dim], dim=-1)
        shared = ropes.unsqueeze(1).expand(batch, self.heads, context, self.rope_dim)
        return torch.cat([keys, shared], dim=-1), values
