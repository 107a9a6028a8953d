"""``latent_attention``: absorbed MLA queries over all cache rows that a query may see.

    logit[b, s, h, t] = scale * (dot(q_latent[b, s, h], latent[b, t]) + dot(q_rope[b, s, h], rope[b, t]))
    out = softmax(logit) @ latent rows;  lse = log(sum(exp(logit))), natural logarithm;  t < lengths[b] + s

Shapes: ``q_latent`` [B, S, H, L]; ``q_rope`` [B, S, H, R] or None; ``latent`` [B, T, L] and ``rope`` [B, T, R] (both
rope operands or neither), or pages [P, page, .] with ``block_table`` int32 [B, T / page]; ``lengths`` integer, [] or
[B]: rows visible to query 0 (query s sees ``lengths + s``, at most T); None makes all T visible. Where the
``descriptor`` names one buffer, rows of ``latent`` hold both parts (bytes, uint8, when it is quantised) and ``rope`` is
None. A row on an unmapped page (table entry below 0) counts as nothing. ``scale`` is that of the un-absorbed head dim.
Floating types of any width; arithmetic is fp32. ``sink`` [H] or None: a logit of each head, in natural units and not
scaled, that takes its share of the softmax and adds no value.

Returns ``out`` [B, S, H, L] in the type of ``q_latent`` and ``lse`` fp32 [B, S, H], which leaves the sink out. A query
that sees nothing gives 0 and -inf.

Source: the absorbed form of multi-head latent attention, DeepSeek-V2. Errors: none at run time; the fake implementation
raises ValueError for shapes that do not fit.
"""

import torch

from kimigraph.ir.operators.registry import Cost, Operator, nbytes, register
from kimigraph.ir.operators.shapes import cache, capacity, check, check_integer, check_table, latent_row
from kimigraph.ir.reference.latent_attention import latent_attention

_NAME = "latent_attention"


def _fake(
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
    row = latent_row(_NAME, latent, q_latent.shape[-1], (q_rope, rope), descriptor)
    if row == "L" and (q_rope is None) != (rope is None):
        raise ValueError(f"{_NAME}: give both q_rope and rope, or neither")
    sizes = check(
        _NAME,
        q_latent=(q_latent, "B S H L"),
        q_rope=(q_rope, "B S H R"),
        latent=(latent, cache(block_table, row)),
        rope=(rope, cache(block_table, "R")),
        sink=(sink, "H"),
    )
    check_table(_NAME, block_table, sizes["B"])
    check_integer(_NAME, lengths=lengths)
    if lengths is not None and (lengths.dim() > 1 or lengths.numel() not in (1, sizes["B"])):
        raise ValueError(f"{_NAME}: lengths is {list(lengths.shape)}, want [] or [B] with B = {sizes['B']}")
    return q_latent.new_empty(q_latent.shape), q_latent.new_empty(q_latent.shape[:3], dtype=torch.float32)


def _cost(
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
) -> Cost:
    batch, tokens, heads, width = q_latent.shape
    rope_width = 0 if q_rope is None else q_rope.shape[-1]
    rows = batch * capacity(latent, block_table)
    stored = rows * (latent.shape[-1] + (0 if rope is None else rope_width)) * latent.element_size()
    return Cost(
        bytes=stored + 2 * nbytes(q_latent) + nbytes(q_rope, lengths, block_table, sink) + batch * tokens * heads * 4,
        flops=2 * rows * tokens * heads * (2 * width + rope_width),
    )


OPERATOR = register(
    Operator(
        name=_NAME,
        signature=(
            "(Tensor q_latent, Tensor? q_rope, Tensor latent, Tensor? rope, Tensor? lengths=None, *, float scale,"
            ' Tensor? block_table=None, Tensor? sink=None, str descriptor="") -> (Tensor, Tensor)'
        ),
        summary="absorbed MLA attention over all visible cache rows",
        documentation=__doc__,
        reference=latent_attention,
        fake=_fake,
        cost=_cost,
    )
)
