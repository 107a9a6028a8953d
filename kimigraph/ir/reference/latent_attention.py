"""Reference of ``kimigraph::latent_attention``."""

import torch

from kimigraph.ir.reference.sparse_attention import sparse_attention


def latent_attention(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor | None,
    latent: torch.Tensor,
    rope: torch.Tensor | None,
    lengths: torch.Tensor | None = None,
    *,
    scale: float,
    block_table: torch.Tensor | None = None,
    sink: torch.Tensor | None = None,
    descriptor: str = "",
) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``kimigraph.ir.operators.latent_attention``: sparse attention over the list of all visible rows."""
    batch, tokens = q_latent.shape[:2]
    total = latent.shape[1] * (1 if block_table is None else block_table.shape[1])
    position = torch.arange(total, device=q_latent.device).expand(batch, tokens, total)
    if lengths is not None:
        row = torch.arange(tokens, device=q_latent.device).view(1, tokens, 1)
        position = torch.where(position < lengths.reshape(-1, 1, 1) + row, position, -1)
    return sparse_attention(
        q_latent, q_rope, latent, rope, position, scale=scale, block_table=block_table, sink=sink, descriptor=descriptor
    )
