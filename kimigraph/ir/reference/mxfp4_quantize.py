"""MXFP4: E2M1 numbers, two a byte, under one power of two (E8M0) for each 32 of a row; OCP MX 1.0.

A matrix [.., rows, columns] is a plane of bytes of the shape [.., rows, columns * 17 / 32]: the codes of all rows, the
first of two columns in the lower half of a byte, then the scales of all rows.
"""

import torch
from torch import Tensor

from kimigraph.ir.reference.e8m0 import from_e8m0, inverse_e8m0

GROUP = 32
ROW_BYTES = GROUP // 2 + 1
"""Of a group: its codes and its scale."""
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The magnitudes of the eight codes; the fourth bit is the sign."""


def mxfp4_quantize(weight: Tensor) -> Tensor:
    """See ``kimigraph.ir.operators.mxfp4_quantize``."""
    groups = weight.float().unflatten(-1, (-1, GROUP))
    largest = (groups.contiguous().view(torch.int32) & 0x7FFFFFFF).amax(-1)
    # The exponent of 4, the power of two below the largest number, is 2.
    scales = torch.where(largest > 0x7F800000, 255, ((largest >> 23) - 2).clamp(0, 254)).to(torch.uint8)
    return joined_planes(e2m1_codes(groups * inverse_e8m0(scales).unsqueeze(-1)).flatten(-2), scales)


def e2m1_codes(values: Tensor) -> Tensor:
    """fp32 -> the codes of the nearest E2M1 numbers as uint8, ties to even, 6 at most; 0 for NaN."""
    magnitude = values.abs()
    halfway = ((0.25, False), (0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False))
    code = torch.zeros_like(values, dtype=torch.uint8)
    for middle, up in halfway:
        code += (magnitude >= middle if up else magnitude > middle).to(torch.uint8)
    return code | (values.signbit() & ~values.isnan()).to(torch.uint8) << 3


def joined_planes(codes: Tensor, scales: Tensor) -> Tensor:
    """Codes [.., rows, columns] and scales [.., rows, columns / 32], uint8 -> the plane."""
    return plane_of(codes[..., ::2] | codes[..., 1::2] << 4, scales)


def plane_of(packed: Tensor, scales: Tensor) -> Tensor:
    """Two codes a byte [.., rows, columns / 2] and scales [.., rows, columns / 32], uint8 -> the plane."""
    whole = torch.cat([packed.flatten(-2), scales.flatten(-2)], dim=-1)
    return whole.unflatten(-1, (packed.shape[-2], -1))


def parts_of(plane: Tensor) -> tuple[Tensor, Tensor]:
    """The plane [.., rows, columns * 17 / 32] -> what ``plane_of`` joined: views, where the plane is contiguous."""
    rows, columns = plane.shape[-2], mxfp4_columns(plane.shape[-1])
    packed, scales = plane.flatten(-2).split([rows * columns // 2, rows * columns // GROUP], dim=-1)
    return packed.unflatten(-1, (rows, columns // 2)), scales.unflatten(-1, (rows, columns // GROUP))


def mxfp4_columns(row: int) -> int:
    """Columns of a matrix whose plane has rows of ``row`` bytes; ValueError where no matrix has."""
    if row % ROW_BYTES:
        raise ValueError(f"rows of {row} bytes hold no mxfp4, want a multiple of {ROW_BYTES}")
    return row // ROW_BYTES * GROUP


def mxfp4_dequantize(plane: Tensor) -> Tensor:
    """The plane [.., rows, columns * 17 / 32] -> fp32 [.., rows, columns], exactly; a group of scale 255 is NaN."""
    return e2m1_numbers(*parts_of(plane))


def e2m1_numbers(packed: Tensor, scales: Tensor) -> Tensor:
    """Two codes a byte [.., columns / 2] and scales [.., columns / 32], uint8 -> fp32 [.., columns], exactly."""
    codes = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)
    table = torch.tensor([*E2M1, *(-magnitude for magnitude in E2M1)], device=packed.device)
    return (table[codes.int()].unflatten(-1, (-1, GROUP)) * from_e8m0(scales).unsqueeze(-1)).flatten(-2)


def mxfp4_rounded(weight: Tensor) -> Tensor:
    """What MXFP4 leaves of a weight, in its type."""
    return mxfp4_dequantize(mxfp4_quantize(weight)).to(weight.dtype)
