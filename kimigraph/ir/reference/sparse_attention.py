"""Reference of ``kimigraph::sparse_attention``."""

import math

import torch

from kimigraph.ir.reference.cache_bytes import read_latents


def sparse_attention(
    q_latent: torch.Tensor,
    q_rope: torch.Tensor | None,
    latent: torch.Tensor,
    rope: torch.Tensor | None,
    indices: torch.Tensor,
    *,
    scale: float,
    block_table: torch.Tensor | None = None,
    sink: torch.Tensor | None = None,
    rows: bool = False,
    descriptor: str = "",
) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``kimigraph.ir.operators.sparse_attention``: softmax over the picked rows alone."""
    if rows:
        latent = latent.flatten(0, 1).unsqueeze(0)
        rope = None if rope is None else rope.flatten(0, 1).unsqueeze(0)
    page = latent.shape[1]
    total = page if block_table is None else block_table.shape[1] * page
    valid = (indices >= 0) & (indices < total)
    logical = torch.where(valid, indices, 0).long()
    sequence = torch.arange(indices.shape[0], device=indices.device).view(-1, 1, 1)
    if block_table is None:
        row = logical if rows else sequence * page + logical
    else:
        block = block_table[sequence, logical // page].long() if total else torch.full_like(logical, -1)
        valid = valid & (block >= 0)
        row = block.clamp_min(0) * page + logical % max(page, 1)
    # A row that counts as nothing is zero before the products, whatever stands in the cache there.
    if latent.dtype == torch.uint8 or (q_rope is not None and rope is None):
        latent, rope = read_latents(latent, descriptor)
    values = _rows(latent, row, valid)
    scores = torch.einsum("bshl,bskl->bshk", q_latent.float(), values)
    if q_rope is not None and rope is not None:
        scores = scores + torch.einsum("bshr,bskr->bshk", q_rope.float(), _rows(rope, row, valid))
    scores = (scores * scale).masked_fill(~valid.unsqueeze(2), -math.inf)
    lse = torch.logsumexp(scores, dim=-1)
    whole = lse if sink is None else torch.logaddexp(lse, sink.float())
    weights = torch.where(lse.unsqueeze(-1).isneginf(), 0.0, torch.exp(scores - whole.unsqueeze(-1)))
    out = torch.einsum("bshk,bskl->bshl", weights, values)
    return out.to(q_latent.dtype), lse


def _rows(cache: torch.Tensor, row: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    flat = cache.reshape(-1, cache.shape[-1])
    if flat.shape[0] == 0:
        return torch.zeros(*row.shape, cache.shape[-1], device=cache.device)
    return torch.where(valid.unsqueeze(-1), flat[row].float(), 0.0)
