"""The scores of all cached keys of ``lightning_indexer``."""

import math

import torch

from kimigraph.ir.reference.cache_bytes import descriptor_fields, read_index_keys
from kimigraph.ir.reference.mxfp8_quantize import mxfp8_dequantize, mxfp8_quantize


def key_scores(
    q: torch.Tensor,
    keys: torch.Tensor,
    weights: torch.Tensor,
    *,
    scale: float,
    block_table: torch.Tensor | None = None,
    q_scales: torch.Tensor | None = None,
    quantises_q: bool = False,
    descriptor: str = "",
) -> torch.Tensor:
    """fp32 [B, S, T] of every key of each sequence, of unmapped pages too; NaN as -inf, -0 as +0."""
    if keys.dtype == torch.uint8:
        keys = read_index_keys(keys, descriptor)
    fields = descriptor_fields(descriptor)
    if quantises_q:
        q, q_scales = mxfp8_quantize(q, group=int(fields["group"]))
    if q_scales is not None:
        q = mxfp8_dequantize(q, q_scales, group=int(fields["group"]))
    if block_table is not None:
        keys = keys[block_table.clamp_min(0).long()].flatten(1, 2)
    dots = torch.einsum("bshd,btd->bsht", q.float(), keys.float()) * scale
    scores = torch.einsum("bsh,bsht->bst", weights.float(), dots.relu())
    # Adding +0 turns -0 into +0.
    return torch.where(scores.isnan(), -math.inf, scores) + 0.0
