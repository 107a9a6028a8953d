"""Reference of ``kimigraph::kda_decode``."""

import torch
import torch.nn.functional as F


def kda_decode(
    qkv: torch.Tensor,
    conv_weight: torch.Tensor,
    conv_state: torch.Tensor,
    gate: torch.Tensor,
    dt_bias: torch.Tensor,
    a_log: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    out_gate: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    slots: torch.Tensor | None = None,
    gate_weight: torch.Tensor | None = None,
    *,
    scale: float,
    l2_eps: float = 1e-6,
    lower_bound: float | None = None,
    norm_eps: float = 1e-5,
    state_layout: str = "kv",
) -> torch.Tensor:
    """See ``kimigraph.ir.operators.kda_decode``: token by token in fp32; conv_state and state change in place."""
    if slots is not None:
        live = slots > 0
        entries = slots.clamp_min(0).long()
        own_conv, own_state = conv_state[entries], state[entries]
        out = kda_decode(
            qkv, conv_weight, own_conv, gate, dt_bias, a_log, beta, own_state, out_gate, norm_weight, None, gate_weight,
            scale=scale, l2_eps=l2_eps, lower_bound=lower_bound, norm_eps=norm_eps, state_layout=state_layout,
        )  # fmt: skip
        conv_state[entries[live]] = own_conv[live]
        state[entries[live]] = own_state[live]
        return torch.where(live.reshape(-1, 1, 1, 1), out, torch.zeros_like(out))
    if gate_weight is not None:
        gate = gate.float() @ gate_weight.float().t()
    batch, tokens = qkv.shape[:2]
    heads, history, width = a_log.numel(), conv_state.shape[-1], conv_weight.shape[-1]
    key_dim = gate.shape[-1] // heads if gate.dim() == 3 else gate.shape[-1]
    value_dim = qkv.shape[-1] // heads - 2 * key_dim
    memory = state.float().transpose(-1, -2) if state_layout == "vk" else state.float()  # [B, H, K, V]
    window = torch.cat([conv_state.float(), qkv.float().transpose(1, 2)], dim=-1)
    taps = conv_weight.reshape(-1, width).float()
    rate = a_log.float().exp().reshape(1, heads, 1)
    outputs: list[torch.Tensor] = []
    for token in range(tokens):
        end = history + token + 1
        mixed = F.silu((window[..., end - width : end] * taps).sum(-1))
        q, k, v = mixed.split([heads * key_dim, heads * key_dim, heads * value_dim], dim=-1)
        q, k, v = (x.reshape(batch, heads, -1) for x in (q, k, v))
        q = q * torch.rsqrt(q.square().sum(-1, keepdim=True) + l2_eps) * scale
        k = k * torch.rsqrt(k.square().sum(-1, keepdim=True) + l2_eps)
        logit = gate[:, token].reshape(batch, -1).float() + dt_bias.reshape(1, -1).float()
        logit = logit.reshape(batch, heads, key_dim)
        decay = -rate * F.softplus(logit) if lower_bound is None else lower_bound * torch.sigmoid(rate * logit)
        strength = torch.sigmoid(beta[:, token].reshape(batch, heads, 1).float())
        memory = memory * decay.exp().unsqueeze(-1)
        update = strength * (v - (memory * k.unsqueeze(-1)).sum(-2))
        memory = memory + k.unsqueeze(-1) * update.unsqueeze(-2)
        out = (memory * q.unsqueeze(-1)).sum(-2)
        if norm_weight is not None:
            out = out * torch.rsqrt(out.square().mean(-1, keepdim=True) + norm_eps) * norm_weight.float()
        if out_gate is not None:
            out = out * torch.sigmoid(out_gate[:, token].reshape(batch, heads, value_dim).float())
        outputs.append(out)
    conv_state.copy_(window[..., tokens:])
    state.copy_(memory.transpose(-1, -2) if state_layout == "vk" else memory)
    if not outputs:
        return qkv.new_empty((batch, 0, heads, value_dim))
    return torch.stack(outputs, dim=1).to(qkv.dtype)
