"""``mxfp4_quantize``: weights as MXFP4, in the bytes that ``moe_experts`` reads.

    e = floor(log2(max |w|)) - 2 over each 32 columns of a row;  code = the nearest E2M1 number to w / 2^e, at most 6
    in magnitude, ties to even

Shapes: ``weight`` [.., R, C] of a floating type, C a multiple of 32. Returns uint8 [.., R, 17 C / 32]: for each
matrix its codes, two columns a byte, the first in the lower half, row after row; then its scales (E8M0), row after row.
Groups of zeros have scale 0, groups with a NaN 255; exponents stop at -127. Numbers that come from MXFP4 lose nothing:
the exponent may differ from the one they had, their values do not.

Source: OCP Microscaling Formats 1.0, section 6.3. Errors: none at run time; the fake implementation raises ValueError
for rows that 32 does not divide.
"""

import torch

from kimigraph.ir.operators.registry import Cost, Operator, nbytes, register
from kimigraph.ir.reference.mxfp4_quantize import GROUP, ROW_BYTES, mxfp4_quantize

_NAME = "mxfp4_quantize"


def _fake(weight: torch.Tensor) -> torch.Tensor:
    if weight.dim() < 2 or weight.shape[-1] % GROUP or not weight.is_floating_point():
        raise ValueError(
            f"{_NAME}: weight is {weight.dtype} {list(weight.shape)}, want floats [.., R, C], C a multiple of {GROUP}"
        )
    row = weight.shape[-1] // GROUP * ROW_BYTES
    return weight.new_empty((*weight.shape[:-1], row), dtype=torch.uint8)


def _cost(weight: torch.Tensor) -> Cost:
    return Cost(bytes=nbytes(weight) + weight.numel() // GROUP * ROW_BYTES, flops=2 * weight.numel())


OPERATOR = register(
    Operator(
        name=_NAME,
        signature="(Tensor weight) -> Tensor",
        summary="weights as MXFP4: E2M1 under one power of two for each 32, codes before scales",
        documentation=__doc__,
        reference=mxfp4_quantize,
        fake=_fake,
        cost=_cost,
    )
)
