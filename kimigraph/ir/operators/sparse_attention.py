"""``sparse_attention``: absorbed MLA queries over the cache rows that the indices name.

    logit[b, s, h, j] = scale * (dot(q_latent[b, s, h], latent[b, i]) + dot(q_rope[b, s, h], rope[b, i]))
    out = softmax(logit) @ latent rows;  lse = log(sum(exp(logit))), natural logarithm;  i = indices[b, s, j]

Shapes: ``q_latent`` [B, S, H, L]; ``q_rope`` [B, S, H, R] or None; ``latent`` [B, T, L] and ``rope`` [B, T, R] (both
rope operands or neither), or pages [P, page, .] with ``block_table`` int32 [B, T / page]; ``indices`` int32 [B, S, K],
logical positions, or with ``rows``, no block table and pages: rows of the flattened pages, page * page size + offset.
Where the ``descriptor`` names one buffer, rows of ``latent`` hold both parts (bytes, uint8, when it is quantised) and
``rope`` is None. An index below 0, beyond T, or on an unmapped page (table entry below 0) counts as nothing. ``scale``
is that of the un-absorbed head dim. Floating types of any width; arithmetic is fp32. ``sink`` [H] or None: a logit of
each head, in natural units and not scaled, that takes its share of the softmax and adds no value.

Returns ``out`` [B, S, H, L] in the type of ``q_latent`` and ``lse`` fp32 [B, S, H], which leaves the sink out. A row
without a valid index gives 0 and -inf. An index that stands twice counts twice.

Source: DeepSeek-V3.2-Exp and FlashMLA's sparse decode. Errors: none at run time; the fake implementation raises
ValueError for shapes that do not fit.
"""

import torch

from kimigraph.ir.operators.registry import Cost, Operator, nbytes, register
from kimigraph.ir.operators.shapes import cache, check, check_integer, check_table, latent_row
from kimigraph.ir.reference.sparse_attention import sparse_attention


def _fake(
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
    name = "sparse_attention"
    row = latent_row(name, latent, q_latent.shape[-1], (q_rope, rope), descriptor)
    if row == "L" and (q_rope is None) != (rope is None):
        raise ValueError(f"{name}: give both q_rope and rope, or neither")
    sizes = check(
        name,
        q_latent=(q_latent, "B S H L"),
        q_rope=(q_rope, "B S H R"),
        latent=(latent, f"P page {row}" if rows else cache(block_table, row)),
        rope=(rope, "P page R" if rows else cache(block_table, "R")),
        indices=(indices, "B S K"),
        sink=(sink, "H"),
    )
    check_table(name, block_table, sizes["B"])
    if rows and block_table is not None:
        raise ValueError(f"{name}: indices that are rows already need no block_table")
    check_integer(name, indices=indices)
    return q_latent.new_empty(q_latent.shape), q_latent.new_empty(q_latent.shape[:3], dtype=torch.float32)


def _cost(
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
) -> Cost:
    batch, tokens, heads, width = q_latent.shape
    rope_width = 0 if q_rope is None else q_rope.shape[-1]
    picks = batch * tokens * indices.shape[-1]
    gathered = picks * (latent.shape[-1] + (0 if rope is None else rope_width)) * latent.element_size()
    return Cost(
        bytes=gathered + 2 * nbytes(q_latent) + nbytes(q_rope, indices, block_table, sink) + batch * tokens * heads * 4,
        flops=2 * picks * heads * (2 * width + rope_width),
    )


OPERATOR = register(
    Operator(
        name="sparse_attention",
        signature=(
            "(Tensor q_latent, Tensor? q_rope, Tensor latent, Tensor? rope, Tensor indices, *, float scale,"
            ' Tensor? block_table=None, Tensor? sink=None, bool rows=False, str descriptor="") -> (Tensor, Tensor)'
        ),
        summary="absorbed MLA attention over the picked cache rows",
        documentation=__doc__,
        reference=sparse_attention,
        fake=_fake,
        cost=_cost,
    )
)
