"""Reference of ``kimigraph::kda_prefill_deltas``."""

import itertools

import torch
import torch.nn.functional as F


def kda_prefill_deltas(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None = None,
    a_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    *,
    scale: float,
    l2_norm: bool,
    l2_eps: float = 1e-6,
    lower_bound: float | None = None,
    state_layout: str = "kv",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See ``kimigraph.ir.operators.kda_prefill_deltas``: the recurrence itself, token by token in fp32.

    No chunks, so no exponent is ever positive and a last short chunk cannot go wrong.
    """
    batch, tokens, heads, key_dim = q.shape
    query, key = q.float(), k.float()
    if l2_norm:
        query = query * torch.rsqrt(query.square().sum(-1, keepdim=True) + l2_eps)
        key = key * torch.rsqrt(key.square().sum(-1, keepdim=True) + l2_eps)
    query, key = (query * scale).unsqueeze(-1), key.unsqueeze(-1)
    gate, strength = g.float(), beta.float()
    if a_log is not None and dt_bias is not None:
        rate, logit = a_log.float().exp().reshape(heads, 1), gate + dt_bias.float().reshape(heads, key_dim)
        gate = -rate * F.softplus(logit) if lower_bound is None else lower_bound * torch.sigmoid(rate * logit)
        strength = torch.sigmoid(strength)
    value, strength, decay = v.float(), strength.unsqueeze(-1), gate.exp().unsqueeze(-1)
    everything = slice(None)
    runs: list[tuple[int | slice, int | slice, int, int]] = [(everything, everything, 0, tokens)]
    if cu_seqlens is not None:
        edges = itertools.pairwise(int(edge) for edge in cu_seqlens)
        runs = [(sequence, 0, first, last) for sequence, (first, last) in enumerate(edges)]
    sequences = batch if cu_seqlens is None else len(runs)
    final = torch.zeros(sequences, heads, key_dim, v.shape[-1], device=v.device)
    if initial_state is not None:
        final += initial_state.float().transpose(-1, -2) if state_layout == "vk" else initial_state.float()
    out = torch.empty(v.shape, dtype=torch.float32, device=v.device)
    deltas = torch.empty_like(out)
    for sequence, row, first, last in runs:
        memory = final[sequence]  # [B, H, K, V], of a packed sequence [H, K, V]
        for token in range(first, last):
            memory = memory * decay[row, token]
            update = strength[row, token] * (value[row, token] - (memory * key[row, token]).sum(-2))
            memory = memory + key[row, token] * update.unsqueeze(-2)
            deltas[row, token] = update
            out[row, token] = (memory * query[row, token]).sum(-2)
        final[sequence] = memory
    final = final.transpose(-1, -2) if state_layout == "vk" else final
    return out.to(v.dtype), final.clone(memory_format=torch.contiguous_format), deltas
