"""Reference of ``kimigraph::kda_prefill``."""

import torch


def kda_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None = None,
    *,
    scale: float,
    l2_norm: bool,
    l2_eps: float = 1e-6,
    state_layout: str = "kv",
) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``kimigraph.ir.operators.kda_prefill``: the recurrence itself, token by token in fp32.

    No chunks, so no exponent is ever positive and a last short chunk cannot go wrong.
    """
    batch, tokens, heads, key_dim = q.shape
    query, key = q.float(), k.float()
    if l2_norm:
        query = query * torch.rsqrt(query.square().sum(-1, keepdim=True) + l2_eps)
        key = key * torch.rsqrt(key.square().sum(-1, keepdim=True) + l2_eps)
    query, key = (query * scale).unsqueeze(-1), key.unsqueeze(-1)
    value, strength, decay = v.float(), beta.float().unsqueeze(-1), g.float().exp().unsqueeze(-1)
    if initial_state is None:
        memory = torch.zeros(batch, heads, key_dim, v.shape[-1], device=v.device)
    else:
        memory = initial_state.float()
        memory = memory.transpose(-1, -2) if state_layout == "vk" else memory  # [B, H, K, V]
    out = torch.empty(v.shape, dtype=torch.float32, device=v.device)
    for token in range(tokens):
        memory = memory * decay[:, token]
        update = strength[:, token] * (value[:, token] - (memory * key[:, token]).sum(-2))
        memory = memory + key[:, token] * update.unsqueeze(-2)
        out[:, token] = (memory * query[:, token]).sum(-2)
    final = memory.transpose(-1, -2) if state_layout == "vk" else memory
    return out.to(v.dtype), final.clone(memory_format=torch.contiguous_format)
