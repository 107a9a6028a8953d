"""Reference of ``kimigraph::kda_decode_logged``."""

import torch

from kimigraph.ir.reference.kda_tokens import kda_tokens, stacked_outputs


def kda_decode_logged(
    qkv: torch.Tensor,
    conv_weight: torch.Tensor,
    conv_state: torch.Tensor,
    gate: torch.Tensor,
    dt_bias: torch.Tensor,
    a_log: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    keys: torch.Tensor,
    decays: torch.Tensor,
    deltas: torch.Tensor,
    filled: torch.Tensor,
    out_gate: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    *,
    scale: float,
    l2_eps: float = 1e-6,
    lower_bound: float | None = None,
    norm_eps: float = 1e-5,
    state_layout: str = "kv",
) -> torch.Tensor:
    """See ``kimigraph.ir.operators.kda_decode_logged``: the records folded in, then a token of ``kda_decode``."""
    is_vk, length = state_layout == "vk", keys.shape[1]
    memory = state.float().transpose(-1, -2) if is_vk else state.float()  # [B, H, K, V]
    count = filled.clamp(0, length - 1).long()
    for token in range(length - 1):
        decayed = memory * decays[:, token].unsqueeze(-1)
        updated = decayed + keys[:, token].unsqueeze(-1) * deltas[:, token].unsqueeze(-2)
        memory = torch.where((token < count).reshape(-1, 1, 1, 1), updated, memory)
    made = kda_tokens(
        qkv, conv_weight, conv_state, gate, dt_bias, a_log, beta, memory.transpose(-1, -2) if is_vk else memory,
        out_gate, norm_weight, None,
        scale=scale, l2_eps=l2_eps, lower_bound=lower_bound, norm_eps=norm_eps, state_layout=state_layout,
    )  # fmt: skip
    conv_state.copy_(made.window[..., qkv.shape[1] :])
    new = made.states[-1].transpose(-1, -2) if is_vk else made.states[-1]
    writes = count == length - 1
    state.copy_(torch.where(writes.reshape(-1, 1, 1, 1), new.to(state.dtype), state))
    rows = torch.arange(qkv.shape[0], device=count.device)
    for records, values in ((keys, made.keys), (decays, made.decays), (deltas, made.deltas)):
        kept = writes.reshape(-1, 1, 1)
        records[rows, count] = torch.where(kept, records[rows, count], values[-1])
    return stacked_outputs(made, qkv, state.shape[1], state.shape[2 if is_vk else 3])
