"""Reference of ``kimigraph::lightning_indexer``."""

import math

import torch


def lightning_indexer(q, keys, weights, lengths=None, mask=None, *, k, scale, block_table=None, descriptor=""):
    """See ``kimigraph.ir.operators.lightning_indexer``: scores, then the exact set of the first k, listed ascending."""
    if block_table is not None:
        keys = keys[block_table.clamp_min(0).long()].flatten(1, 2)
    batch, tokens, total = q.shape[0], q.shape[1], keys.shape[1]
    dots = torch.einsum("bshd,btd->bsht", q.float(), keys.float()) * scale
    scores = torch.einsum("bsh,bsht->bst", weights.float(), dots.relu())
    visible = torch.ones(batch, tokens, total, dtype=torch.bool, device=q.device)
    position = torch.arange(total, device=q.device)
    if lengths is not None:
        limit = lengths.reshape(-1, 1, 1) + torch.arange(tokens, device=q.device).view(1, tokens, 1)
        visible = visible & (position < limit)
    if mask is not None:
        visible = visible & mask.expand(batch, tokens, total)
    scores = torch.where(scores.isnan(), torch.full_like(scores, -math.inf), scores) + 0.0
    # Two stable sorts: by score (descending, index ascending), then visible keys before hidden ones.
    order = scores.argsort(dim=-1, descending=True, stable=True)
    hidden = ~visible.gather(-1, order)
    order = order.gather(-1, hidden.int().argsort(dim=-1, stable=True))[..., :k]
    picked = torch.where(visible.gather(-1, order), order, torch.full_like(order, total)).sort(dim=-1).values
    rows = torch.where(picked == total, torch.full_like(picked, -1), picked).to(torch.int32)
    return torch.nn.functional.pad(rows, (0, k - rows.shape[-1]), value=-1)
