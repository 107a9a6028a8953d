"""A Kimi Delta Attention layer: linear attention with a per-channel decay and a fixed-size state.

Source: the Kimi Linear and Kimi K3 technical reports (full-rank output gate, bounded decay).
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kimigraph.models.kimi_k31.configuration import KimiConfig
from kimigraph.models.kimi_k31.delta_rule import (
    chunk_kimi_delta_attention,
    kimi_delta_attention_step,
    log_decay,
    short_convolution,
)
from kimigraph.models.kimi_k31.normalization import GatedRMSNorm


class ShortConvolution(nn.Module):
    """The packed depthwise filters of q, k and v: ``weight`` [3 * H * K, 1, W], fp32."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, width, dtype=torch.float32))


class KimiDeltaAttention(nn.Module):
    """One KDA layer. A single token takes the flat step; more tokens the chunk form. Both continue from the states."""

    def __init__(self, config: KimiConfig) -> None:
        super().__init__()
        linear, dtype, hidden = config.linear_attn_config, config.torch_dtype, config.hidden_size
        self.heads = linear.num_heads
        self.head_dim = linear.head_dim
        self.lower_bound = linear.gate_lower_bound
        width = self.heads * self.head_dim
        self.q_proj = nn.Linear(hidden, width, bias=False, dtype=dtype)
        self.k_proj = nn.Linear(hidden, width, bias=False, dtype=dtype)
        self.v_proj = nn.Linear(hidden, width, bias=False, dtype=dtype)
        self.conv1d = ShortConvolution(3 * width, linear.short_conv_kernel_size)
        self.f_a_proj = nn.Linear(hidden, self.head_dim, bias=False, dtype=dtype)
        self.f_b_proj = nn.Linear(self.head_dim, width, bias=False, dtype=dtype)
        self.b_proj = nn.Linear(hidden, self.heads, bias=False, dtype=dtype)
        self.g_proj = nn.Linear(hidden, width, bias=False, dtype=dtype)
        self.o_proj = nn.Linear(width, hidden, bias=False, dtype=dtype)
        self.o_norm = GatedRMSNorm(self.head_dim, config.rms_norm_eps)
        self.A_log = nn.Parameter(torch.empty(self.heads, dtype=torch.float32))
        self.dt_bias = nn.Parameter(torch.empty(width, dtype=torch.float32))

    def forward(self, x: Tensor, state: Tensor, conv_state: Tensor) -> Tensor:
        """``x`` [B, S, d] to the same; ``state`` [B, H, V, K] and ``conv_state`` [B, 3HK, W - 1] change in place."""
        batch, tokens, _ = x.shape
        per_head = (batch, tokens, self.heads, self.head_dim)
        qkv = torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x)], dim=-1)
        logits = self.f_b_proj(self.f_a_proj(x)).float() + self.dt_bias
        g = log_decay(logits.view(per_head), self.A_log, self.lower_bound)
        beta = torch.sigmoid(self.b_proj(x).float())
        if tokens == 1:
            out = self.step(qkv, g, beta, state, conv_state)
        else:
            out = self.chunks(qkv, g, beta, state, conv_state)
        out = self.o_norm(out, self.g_proj(x).view(per_head))
        return self.o_proj(out.flatten(2))

    def step(self, qkv: Tensor, g: Tensor, beta: Tensor, state: Tensor, conv_state: Tensor) -> Tensor:
        """One token a sequence: read-out fp32 [B, 1, H, V]."""
        window = torch.cat([conv_state, qkv.transpose(1, 2).to(conv_state.dtype)], dim=-1)
        mixed = F.silu(F.conv1d(window.float(), self.conv1d.weight, groups=self.conv1d.weight.shape[0]))
        conv_state.copy_(window[..., 1:])
        q, k, v = (part.view(-1, self.heads, self.head_dim) for part in mixed.squeeze(-1).chunk(3, dim=-1))
        out, new_state = kimi_delta_attention_step(q, k, v, g[:, 0], beta[:, 0].unsqueeze(-1), state)
        state.copy_(new_state)
        return out.unsqueeze(1)

    def chunks(self, qkv: Tensor, g: Tensor, beta: Tensor, state: Tensor, conv_state: Tensor) -> Tensor:
        """Several tokens a sequence: read-outs [B, S, H, V] in the type of ``qkv``."""
        mixed, new_conv_state = short_convolution(qkv, self.conv1d.weight, conv_state)
        conv_state.copy_(new_conv_state)
        q, k, v = (part.unflatten(-1, (self.heads, self.head_dim)) for part in mixed.chunk(3, dim=-1))
        out, new_state = chunk_kimi_delta_attention(q, k, v, g, beta, state)
        state.copy_(new_state)
        return out
