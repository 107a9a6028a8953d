"""``index_key_write``: put new index keys into their cache, in place.

    keys[b, positions[b, s]] = values[b, s]

Shapes: ``keys`` [B, T, D], mutated, or pages [P, page, D] with ``block_table`` int32 [B, N] (position p lives in row
p % page of page block_table[b, p // page]); ``values`` [B, S, D]; ``positions`` integer [B, S], distinct within a
sequence, below 0 = skip the row. Values are converted to the cache's type; bytes, uint8 [., ., D + scales], take them
under a quantised ``descriptor``. Returns nothing.

Before that, in fp32 with one rounding at the end: with ``norm_weight`` [D] (and ``norm_bias`` [D]) a layer norm of
``norm_eps``; with a ``rope_style`` the first R dims turn by ``cos`` and ``sin`` [B, S, R / 2]: half_split in pairs
(i, i + R / 2), interleaved in pairs (2i, 2i + 1), deinterleaved in those, put to i and i + R / 2; where the descriptor
says so (``rotation`` hadamard) the row is then turned as a whole, times the Hadamard matrix in Sylvester's order over
sqrt(D), summed in fp64 and rounded to fp32.

Source: the cache update of DeepSeek-V3.2-Exp's indexer. Errors: IndexError, with nothing written, for a position beyond
the capacity or on an unmapped page (table entry below 0), which kernels skip; the fake implementation raises ValueError
for shapes and styles that do not fit.
"""

import torch

from kimigraph.ir.operators.registry import Cost, Operator, nbytes, register
from kimigraph.ir.operators.shapes import cache, check, check_integer, check_rotation, check_table, key_row
from kimigraph.ir.reference.index_key_write import index_key_write

_NAME = "index_key_write"


def _fake(
    keys: torch.Tensor,
    values: torch.Tensor,
    positions: torch.Tensor,
    norm_weight: torch.Tensor | None = None,
    norm_bias: torch.Tensor | None = None,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    *,
    norm_eps: float = 1e-6,
    rope_style: str = "none",
    block_table: torch.Tensor | None = None,
    descriptor: str = "",
) -> None:
    row = key_row(_NAME, keys, values.shape[-1], descriptor)
    sizes = check(_NAME, values=(values, "B S D"), keys=(keys, cache(block_table, row)), positions=(positions, "B S"))
    check_integer(_NAME, positions=positions)
    check_table(_NAME, block_table, sizes["B"])
    width = values.shape[-1]
    check(_NAME, norm_weight=(norm_weight, str(width)), norm_bias=(norm_bias, str(width)))
    if norm_bias is not None and norm_weight is None:
        raise ValueError(f"{_NAME}: norm_bias without norm_weight")
    check_rotation(_NAME, rope_style, cos, sin, values.shape[:2], width, whole=False)


def _cost(
    keys: torch.Tensor,
    values: torch.Tensor,
    positions: torch.Tensor,
    norm_weight: torch.Tensor | None = None,
    norm_bias: torch.Tensor | None = None,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    *,
    norm_eps: float = 1e-6,
    rope_style: str = "none",
    block_table: torch.Tensor | None = None,
    descriptor: str = "",
) -> Cost:
    written = positions.numel() * keys.shape[-1] * keys.element_size()
    return Cost(bytes=nbytes(values, positions, norm_weight, norm_bias, cos, sin, block_table) + written, flops=0)


OPERATOR = register(
    Operator(
        name=_NAME,
        signature=(
            "(Tensor(a!) keys, Tensor values, Tensor positions, Tensor? norm_weight=None, Tensor? norm_bias=None,"
            ' Tensor? cos=None, Tensor? sin=None, *, float norm_eps=1e-6, str rope_style="none",'
            ' Tensor? block_table=None, str descriptor="") -> ()'
        ),
        summary="write new index keys into their cache",
        documentation=__doc__,
        reference=index_key_write,
        fake=_fake,
        cost=_cost,
    )
)
