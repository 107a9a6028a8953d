"""``hadamard_rows``: a weight whose product comes out rotated, so that nobody need rotate it.

    out[h * width + i, k] = sum_j H[i, j] / sqrt(width) * weight[h * width + j, k]

Shapes: ``weight`` [N, K] of any floating type, N a multiple of ``width``, a power of two; H is the Hadamard matrix in
Sylvester's order. Sums are fp64, rounded to the type of ``weight`` once. Returns [N, K]. ``x @ out.T`` is ``x @
weight.T`` with each ``width`` columns turned as ``mxfp8_quantize`` and ``fp8_quantize`` turn rows under ``rotate``.

Source: the rotation of DeepSeek-V3.2-Exp's indexer, moved into its weight. Errors: none at run time; the fake
implementation raises ValueError for shapes that do not fit.
"""

import torch

from kimigraph.ir.operators.registry import Cost, Operator, nbytes, register
from kimigraph.ir.operators.shapes import check_power_of_two
from kimigraph.ir.reference.hadamard_rows import hadamard_rows

_NAME = "hadamard_rows"


def _fake(weight: torch.Tensor, *, width: int) -> torch.Tensor:
    check_power_of_two(_NAME, width, True)
    if weight.dim() != 2 or weight.shape[0] % width:
        raise ValueError(f"{_NAME}: weight is {list(weight.shape)}, want [N, K] with N a multiple of {width}")
    return weight.new_empty(weight.shape)


def _cost(weight: torch.Tensor, *, width: int) -> Cost:
    return Cost(bytes=2 * nbytes(weight), flops=weight.numel() * (width.bit_length() - 1))


OPERATOR = register(
    Operator(
        name=_NAME,
        signature="(Tensor weight, *, int width) -> Tensor",
        summary="a weight whose product comes out rotated by the Hadamard matrix",
        documentation=__doc__,
        reference=hadamard_rows,
        fake=_fake,
        cost=_cost,
    )
)
