"""Reference of ``kimigraph::short_conv``."""

import torch
import torch.nn.functional as F


def short_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    initial_state: torch.Tensor | None = None,
    *,
    activation: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``kimigraph.ir.operators.short_conv``: history and inputs side by side, then one pass per tap."""
    batch, tokens, channels = x.shape
    width = weight.shape[-1]
    if initial_state is None:
        history = x.new_zeros(batch, width - 1, channels)
    else:
        history = initial_state[..., initial_state.shape[-1] - (width - 1) :].transpose(1, 2)
    window = torch.cat([history.float(), x.float()], dim=1)
    taps = weight.reshape(channels, width).float()
    y = torch.zeros(batch, tokens, channels, device=x.device)
    for tap in range(width):
        y = y + window[:, tap : tap + tokens] * taps[:, tap]
    final = window[:, tokens:].transpose(1, 2).to(history.dtype)
    return (F.silu(y) if activation else y).to(x.dtype), final.clone(memory_format=torch.contiguous_format)
