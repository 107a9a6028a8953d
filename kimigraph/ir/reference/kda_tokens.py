"""What the references of ``kda_decode`` and of the operators that verify drafts share: the tokens of a step."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F


@dataclass
class KdaTokens:
    """What the tokens of a step made, fp32: ``outputs`` [B, H, V] each, the state behind each [B, H, K, V], and what
    was added to it (``keys``, ``decays`` [B, H, K] and ``deltas`` [B, H, V]); ``window`` [B, C, N + S] is history and
    inputs."""

    window: torch.Tensor
    outputs: list[torch.Tensor]
    states: list[torch.Tensor]
    keys: list[torch.Tensor]
    decays: list[torch.Tensor]
    deltas: list[torch.Tensor]


def kda_tokens(
    qkv: torch.Tensor,
    conv_weight: torch.Tensor,
    conv_state: torch.Tensor,
    gate: torch.Tensor,
    dt_bias: torch.Tensor,
    a_log: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    out_gate: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    gate_weight: torch.Tensor | None,
    *,
    scale: float,
    l2_eps: float,
    lower_bound: float | None,
    norm_eps: float,
    state_layout: str,
) -> KdaTokens:
    """See ``kimigraph.ir.operators.kda_decode``: token by token in fp32; no argument changes."""
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
    made = KdaTokens(window, [], [], [], [], [])
    for token in range(tokens):
        end = history + token + 1
        mixed = F.silu((window[..., end - width : end] * taps).sum(-1))
        q, k, v = mixed.split([heads * key_dim, heads * key_dim, heads * value_dim], dim=-1)
        q, k, v = (x.reshape(batch, heads, -1) for x in (q, k, v))
        q = q * torch.rsqrt(q.square().sum(-1, keepdim=True) + l2_eps) * scale
        norm = torch.rsqrt(k.square().sum(-1, keepdim=True) + l2_eps)
        logit = gate[:, token].reshape(batch, -1).float() + dt_bias.reshape(1, -1).float()
        logit = logit.reshape(batch, heads, key_dim)
        decay = -rate * F.softplus(logit) if lower_bound is None else lower_bound * torch.sigmoid(rate * logit)
        decay = decay.exp()
        strength = torch.sigmoid(beta[:, token].reshape(batch, heads, 1).float())
        memory = memory * decay.unsqueeze(-1)
        update = strength * (v - (memory * (k * norm).unsqueeze(-1)).sum(-2)) * norm
        memory = memory + k.unsqueeze(-1) * update.unsqueeze(-2)
        out = (memory * q.unsqueeze(-1)).sum(-2)
        if norm_weight is not None:
            out = out * torch.rsqrt(out.square().mean(-1, keepdim=True) + norm_eps) * norm_weight.float()
        if out_gate is not None:
            out = out * torch.sigmoid(out_gate[:, token].reshape(batch, heads, value_dim).float())
        made.outputs.append(out)
        made.states.append(memory)
        made.keys.append(k)
        made.decays.append(decay)
        made.deltas.append(update)
    return made


def stacked_outputs(made: KdaTokens, qkv: torch.Tensor, heads: int, value_dim: int) -> torch.Tensor:
    """The outputs of a step [B, S, H, V] in the type of ``qkv``, of no token too."""
    if not made.outputs:
        return qkv.new_empty((qkv.shape[0], 0, heads, value_dim))
    return torch.stack(made.outputs, dim=1).to(qkv.dtype)
