"""Reference of ``kimigraph::kda_decode``."""

import torch
import torch.nn.functional as F


def kda_decode(
    qkv,
    conv_weight,
    conv_state,
    gate,
    dt_bias,
    a_log,
    beta,
    state,
    out_gate=None,
    norm_weight=None,
    *,
    scale,
    l2_eps=1e-6,
    lower_bound=None,
    norm_eps=1e-5,
    state_layout="kv",
):
    """See ``kimigraph.ir.operators.kda_decode``: token by token in fp32; ``conv_state`` and ``state`` change in place."""
    batch, tokens = qkv.shape[:2]
    heads = a_log.numel()
    width = conv_weight.shape[-1]
    key_dim = gate.shape[-1] // heads if gate.dim() == 3 else gate.shape[-1]
    value_dim = qkv.shape[-1] // heads - 2 * key_dim
    memory = state.float().transpose(-1, -2) if state_layout == "vk" else state.float()  # [B, H, K, V]
    window = torch.cat([conv_state, qkv.transpose(1, 2).to(conv_state.dtype)], dim=-1)
    taps = conv_weight.reshape(-1, width).float()
    decay_rate = a_log.float().exp().view(1, heads, 1)
    outputs = []
    for token in range(tokens):
        end = window.shape[-1] - tokens + token + 1
        mixed = F.silu((window[..., end - width : end].float() * taps).sum(-1))
        q, k, v = mixed.split([heads * key_dim, heads * key_dim, heads * value_dim], dim=-1)
        q, k, v = (x.view(batch, heads, -1) for x in (q, k, v))
        q = q * torch.rsqrt(q.square().sum(-1, keepdim=True) + l2_eps) * scale
        k = k * torch.rsqrt(k.square().sum(-1, keepdim=True) + l2_eps)
        logit = (gate[:, token].reshape(batch, -1).float() + dt_bias.reshape(1, -1).float()).view(batch, heads, key_dim)
        if lower_bound is None:
            decay = -decay_rate * F.softplus(logit)
        else:
            decay = lower_bound * torch.sigmoid(decay_rate * logit)
        memory = memory * decay.exp().unsqueeze(-1)
        strength = torch.sigmoid(beta[:, token].reshape(batch, heads, 1).float())
        delta = strength * (v - (memory * k.unsqueeze(-1)).sum(-2))
        memory = memory + k.unsqueeze(-1) * delta.unsqueeze(-2)
        out = (memory * q.unsqueeze(-1)).sum(-2)
        if norm_weight is not None:
            out = out * torch.rsqrt(out.square().mean(-1, keepdim=True) + norm_eps) * norm_weight.float()
        if out_gate is not None:
            out = out * torch.sigmoid(out_gate[:, token].reshape(batch, heads, value_dim).float())
        outputs.append(out)
    conv_state.copy_(window[..., window.shape[-1] - conv_state.shape[-1] :])
    state.copy_(memory.transpose(-1, -2) if state_layout == "vk" else memory)
    return torch.stack(outputs, dim=1).to(qkv.dtype)
