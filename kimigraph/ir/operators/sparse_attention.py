"""``sparse_attention``: absorbed MLA queries over the cache rows that the indices name.

    logit[b, s, h, j] = scale * (dot(q_latent[b, s, h], latent[b, i]) + dot(q_rope[b, s, h], rope[b, i])),  i = indices[b, s, j]
    out = softmax(logit) @ latent rows;  lse = log(sum(exp(logit))), natural logarithm

Shapes: ``q_latent`` [B, S, H, L]; ``q_rope`` [B, S, H, R] or None; ``latent`` [B, T, L] and ``rope`` [B, T, R] (both
needed when ``q_rope`` is given), or pages [P, page, .] with ``block_table`` int32 [B, T / page]; ``indices`` int32
[B, S, K], logical positions, -1 = nothing. Returns ``out`` [B, S, H, L] in the type of ``q_latent`` and ``lse`` fp32
[B, S, H]. A row without a valid index gives 0 and -inf. ``scale`` is that of the un-absorbed head dim.

Source: DeepSeek-V3.2-Exp and FlashMLA's sparse decode. Errors: shapes are checked by the fake implementation.
"""

import torch

from kimigraph.ir.operators.registry import Cost, Operator, nbytes, register
from kimigraph.ir.reference.sparse_attention import sparse_attention


def _fake(q_latent, q_rope, latent, rope, indices, *, scale, block_table=None, descriptor=""):
    torch._check(q_latent.dim() == 4 and latent.dim() == 3 and q_latent.shape[-1] == latent.shape[-1], lambda: f"sparse_attention: q_latent {tuple(q_latent.shape)} and latent {tuple(latent.shape)} do not fit; want [B, S, H, L] and [B, T, L]")
    torch._check((q_rope is None) == (rope is None), lambda: "sparse_attention: give both q_rope and rope, or neither")
    return q_latent.new_empty(q_latent.shape), q_latent.new_empty(q_latent.shape[:3], dtype=torch.float32)


def _cost(q_latent, q_rope, latent, rope, indices, *, scale, block_table=None, descriptor=""):
    batch, tokens, heads, width = q_latent.shape
    rope_width = 0 if rope is None else rope.shape[-1]
    picks = batch * tokens * indices.shape[-1]
    gathered = picks * (width + rope_width) * latent.element_size()
    return Cost(
        bytes=gathered + 2 * nbytes(q_latent) + nbytes(q_rope, indices) + batch * tokens * heads * 4,
        flops=2 * picks * heads * (2 * width + rope_width),
    )


OPERATOR = register(
    Operator(
        name="sparse_attention",
        signature=(
            "(Tensor q_latent, Tensor? q_rope, Tensor latent, Tensor? rope, Tensor indices, *, float scale,"
            ' Tensor? block_table=None, str descriptor="") -> (Tensor, Tensor)'
        ),
        summary="absorbed MLA attention over the picked cache rows",
        reference=sparse_attention,
        fake=_fake,
        cost=_cost,
    )
)
