"""Reference of ``kimigraph::lightning_indexer``."""

import torch

from kimigraph.ir.reference.key_scores import key_scores


def lightning_indexer(
    q: torch.Tensor,
    keys: torch.Tensor,
    weights: torch.Tensor,
    lengths: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    *,
    k: int,
    scale: float,
    block_table: torch.Tensor | None = None,
    q_scales: torch.Tensor | None = None,
    rows: bool = False,
    quantises_q: bool = False,
    descriptor: str = "",
) -> torch.Tensor:
    """See ``kimigraph.ir.operators.lightning_indexer``: scores, then the exact set of the first k, listed ascending."""
    batch, tokens, page = q.shape[0], q.shape[1], keys.shape[1]
    total = page if block_table is None else block_table.shape[1] * page
    visible = torch.ones(batch, tokens, total, dtype=torch.bool, device=q.device)
    if block_table is not None:
        visible &= (block_table >= 0).repeat_interleave(page, dim=1).unsqueeze(1)
    if lengths is not None:
        row = torch.arange(tokens, device=q.device).view(1, tokens, 1)
        visible &= torch.arange(total, device=q.device) < lengths.reshape(-1, 1, 1) + row
    if mask is not None:
        visible &= mask.expand(batch, tokens, total)
    scores = key_scores(
        q,
        keys,
        weights,
        scale=scale,
        block_table=block_table,
        q_scales=q_scales,
        quantises_q=quantises_q,
        descriptor=descriptor,
    )
    # Two stable sorts: by score (descending, index ascending), then visible keys before hidden ones.
    order = scores.argsort(dim=-1, descending=True, stable=True)
    hidden = ~visible.gather(-1, order)
    order = order.gather(-1, hidden.int().argsort(dim=-1, stable=True))[..., :k]
    picked = torch.where(visible.gather(-1, order), order, total).sort(dim=-1).values
    listed = torch.where(picked == total, -1, picked)
    if rows and block_table is not None and total:
        pages = block_table.long().unsqueeze(1).expand(-1, tokens, -1).gather(-1, listed.clamp_min(0) // page)
        listed = torch.where(listed < 0, -1, pages * page + listed % page)
    return torch.nn.functional.pad(listed.to(torch.int32), (0, k - listed.shape[-1]), value=-1)
