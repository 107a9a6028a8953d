"""What a Kimi K3 or K3.1 model carries from step to step: a flat dict of tensors, updated in place."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kimigraph.models.kimi_k31.configuration import KimiConfig, KimiK31Config


def new_cache(
    config: KimiConfig,
    batch: int,
    context: int,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
) -> dict[str, Tensor]:
    """Zeroed caches for ``batch`` sequences of up to ``context`` tokens, in ``dtype`` (default: the configuration's).

    An MLA layer has ``cache.<layer>.latent`` [B, T, kv_lora_rank] and ``.rope`` [B, T, qk_rope_head_dim], and in K3.1
    ``.index_key`` [B, T, index_head_dim]; a KDA layer ``state.<layer>.kda`` fp32 [B, H, V, K] and
    ``state.<layer>.conv`` [B, 3 * H * K, W - 1]. Layers are 0-based.
    """
    dtype = dtype or config.torch_dtype
    linear = config.linear_attn_config
    heads, head_dim = linear.num_heads, linear.head_dim
    channels, columns = 3 * heads * head_dim, linear.short_conv_kernel_size - 1
    cache: dict[str, Tensor] = {}
    for layer in range(config.num_hidden_layers):
        if layer in config.latent_layers:
            widths = {"latent": config.kv_lora_rank, "rope": config.qk_rope_head_dim}
            if isinstance(config, KimiK31Config):
                widths["index_key"] = config.index_head_dim
            for part, width in widths.items():
                cache[f"cache.{layer}.{part}"] = torch.zeros(batch, context, width, dtype=dtype, device=device)
        else:
            cache[f"state.{layer}.kda"] = torch.zeros(batch, heads, head_dim, head_dim, device=device)
            cache[f"state.{layer}.conv"] = torch.zeros(batch, channels, columns, dtype=dtype, device=device)
    return cache


@dataclass(frozen=True)
class Positions:
    """Where the new tokens stand. ``rows`` [B, 1] and ``columns`` [B, S] address their cache slots; ``visible``
    [B, S, T] is causality: a token sees the slots up to its own."""

    rows: Tensor
    columns: Tensor
    visible: Tensor

    @classmethod
    def after(cls, lengths: Tensor, tokens: int, context: int) -> "Positions":
        """Positions of ``tokens`` new tokens a sequence behind ``lengths`` [B] cached ones."""
        device = lengths.device
        rows = torch.arange(lengths.shape[0], device=device).unsqueeze(1)
        columns = lengths.unsqueeze(1) + torch.arange(tokens, device=device)
        visible = torch.arange(context, device=device) <= columns.unsqueeze(-1)
        return cls(rows, columns, visible)

    def write(self, cache: Tensor, values: Tensor) -> Tensor:
        """Put ``values`` [B, S, D] into their slots of ``cache`` [B, T, D], in place; returns the cache."""
        return cache.index_put_((self.rows, self.columns), values.to(cache.dtype))
