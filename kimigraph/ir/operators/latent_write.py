"""``latent_write``: put new MLA rows into their cache, in place.

    latent[b, positions[b, s]] = values[b, s];  rope[b, positions[b, s]] = rope_values[b, s]

Shapes: ``latent`` [B, T, L] and ``rope`` [B, T, R] or None, mutated, or pages [P, page, .] with ``block_table`` int32
[B, N] (position p lives in row p % page of page block_table[b, p // page]); ``values`` [B, S, L]; ``rope_values``
[B, S, R] or None with ``rope``; ``positions`` integer [B, S], distinct within a sequence, below 0 = skip the row.
Values are converted to the cache's type; where the ``descriptor`` names one buffer, both parts go to the row of
``latent`` (bytes, uint8, when it is quantised) and there is no ``rope``. ``rope_style`` turns the rope values
first, in fp32, by ``cos`` and ``sin`` [B, S, R / 2]: half_split in pairs (i, i + R / 2), interleaved in pairs
(2i, 2i + 1), deinterleaved in those, put to i and i + R / 2. With ``norm_weight`` [L] the latent values go through an
RMS norm of ``norm_eps`` first, in fp32 by an fp64 mean of squares, and are rounded once, into the cache. Returns
nothing.

Source: the cache update of DeepSeek-V3.2-Exp. Errors: IndexError, with nothing written, for a position beyond the
capacity or on an unmapped page (table entry below 0), which kernels skip; the fake implementation raises ValueError for
shapes and styles that do not fit.
"""

import torch

from kimigraph.ir.operators.registry import Cost, Operator, nbytes, register
from kimigraph.ir.operators.shapes import (
    cache,
    check,
    check_integer,
    check_rotation,
    check_table,
    check_vectors,
    latent_row,
)
from kimigraph.ir.reference.latent_write import latent_write

_NAME = "latent_write"


def _fake(
    latent: torch.Tensor,
    rope: torch.Tensor | None,
    values: torch.Tensor,
    rope_values: torch.Tensor | None,
    positions: torch.Tensor,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    *,
    rope_style: str = "none",
    block_table: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    norm_eps: float = 1e-6,
    descriptor: str = "",
) -> None:
    row = latent_row(_NAME, latent, values.shape[-1], (rope_values, rope), descriptor)
    if row == "L" and (rope is None) != (rope_values is None):
        raise ValueError(f"{_NAME}: give both rope and rope_values, or neither")
    sizes = check(
        _NAME,
        values=(values, "B S L"),
        rope_values=(rope_values, "B S R"),
        latent=(latent, cache(block_table, row)),
        rope=(rope, cache(block_table, "R")),
        positions=(positions, "B S"),
    )
    check_vectors(_NAME, values.shape[-1], norm_weight=norm_weight)
    check_integer(_NAME, positions=positions)
    check_table(_NAME, block_table, sizes["B"])
    turned = 0 if rope_values is None else rope_values.shape[-1]
    check_rotation(_NAME, rope_style, cos, sin, values.shape[:2], turned, whole=True)


def _cost(
    latent: torch.Tensor,
    rope: torch.Tensor | None,
    values: torch.Tensor,
    rope_values: torch.Tensor | None,
    positions: torch.Tensor,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    *,
    rope_style: str = "none",
    block_table: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    norm_eps: float = 1e-6,
    descriptor: str = "",
) -> Cost:
    rope_width = 0 if rope is None else rope.shape[-1]
    written = positions.numel() * (latent.shape[-1] + rope_width) * latent.element_size()
    read = nbytes(values, rope_values, positions, cos, sin, block_table, norm_weight)
    return Cost(bytes=read + written, flops=0 if norm_weight is None else 4 * values.numel())


OPERATOR = register(
    Operator(
        name=_NAME,
        signature=(
            "(Tensor(a!) latent, Tensor(b!)? rope, Tensor values, Tensor? rope_values, Tensor positions,"
            ' Tensor? cos=None, Tensor? sin=None, *, str rope_style="none", Tensor? block_table=None,'
            ' Tensor? norm_weight=None, float norm_eps=1e-6, str descriptor="") -> ()'
        ),
        summary="write new latent and rope rows into their cache",
        documentation=__doc__,
        reference=latent_write,
        fake=_fake,
        cost=_cost,
    )
)
