"""Reference of ``kimigraph::kda_replay``."""

import torch


def kda_replay(
    state: torch.Tensor,
    conv_state: torch.Tensor,
    keys: torch.Tensor,
    decays: torch.Tensor,
    deltas: torch.Tensor,
    inputs: torch.Tensor,
    accepted: torch.Tensor,
    *,
    state_layout: str = "kv",
) -> None:
    """See ``kimigraph.ir.operators.kda_replay``: forward, a token after the other, as ``kda_decode`` does."""
    tokens, history = keys.shape[2], conv_state.shape[-1]
    count = accepted.clamp(0, tokens).long()
    memory = state.float().transpose(-1, -2) if state_layout == "vk" else state.float()  # [L, P, H, K, V]
    for token in range(tokens):
        decayed = memory * decays[:, :, token].unsqueeze(-1)
        updated = decayed + keys[:, :, token].unsqueeze(-1) * deltas[:, :, token].unsqueeze(-2)
        memory = torch.where((token < count).reshape(1, -1, 1, 1, 1), updated, memory)
    state.copy_(memory.transpose(-1, -2) if state_layout == "vk" else memory)
    window = torch.cat([conv_state, inputs.to(conv_state.dtype).transpose(-1, -2)], dim=-1)
    columns = count.reshape(1, -1, 1, 1) + torch.arange(history, device=count.device)
    conv_state.copy_(window.gather(-1, columns.expand(*conv_state.shape)))
