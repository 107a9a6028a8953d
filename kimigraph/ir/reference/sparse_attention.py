"""Reference of ``kimigraph::sparse_attention``."""

import math

import torch


def sparse_attention(q_latent, q_rope, latent, rope, indices, *, scale, block_table=None, descriptor=""):
    """See ``kimigraph.ir.operators.sparse_attention``: softmax over the picked rows alone."""
    if block_table is not None:
        latent = latent[block_table.clamp_min(0).long()].flatten(1, 2)
        rope = None if rope is None else rope[block_table.clamp_min(0).long()].flatten(1, 2)
    total = latent.shape[1]
    valid = (indices >= 0) & (indices < total)
    row = indices.clamp(0, max(total - 1, 0)).long()
    sequence = torch.arange(latent.shape[0], device=latent.device).view(-1, 1, 1)
    values = torch.where(valid.unsqueeze(-1), latent[sequence, row].float(), 0.0)
    scores = torch.einsum("bshl,bskl->bshk", q_latent.float(), values)
    if q_rope is not None and q_rope.shape[-1] > 0:
        turned = torch.where(valid.unsqueeze(-1), rope[sequence, row].float(), 0.0)
        scores = scores + torch.einsum("bshr,bskr->bshk", q_rope.float(), turned)
    scores = (scores * scale).masked_fill(~valid.unsqueeze(2), -math.inf)
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.where(lse.unsqueeze(-1).isneginf(), 0.0, torch.exp(scores - lse.unsqueeze(-1)))
    out = torch.einsum("bshk,bskl->bshl", weights, values)
    return out.to(q_latent.dtype), lse
