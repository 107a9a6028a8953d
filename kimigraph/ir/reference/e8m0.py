"""E8M0, the scale type of OCP MX 1.0: a byte that holds a power of two alone.

Byte b is 2^(b - 127), from 0 (2^-127, a subnormal of fp32) to 254 (2^127); 255 is NaN. There is no zero, no infinity
and no sign. Everything here works on the bits of fp32: logarithms and powers are off by a unit in the last place where
exponents are large, which is a factor of two in a scale.
"""

import torch


def e8m0_scales(groups: torch.Tensor, rounding: str) -> torch.Tensor:
    """fp32 [..., G] -> uint8 [...]: the scale, as E8M0, that brings each group into the range of E4M3.

    rceil: the smallest power of two by which the largest magnitude, divided, is at most 448; nothing saturates.
    floor: 2^(floor(log2 of it) - 8), the conversion of OCP MX 1.0, section 6.3; what then exceeds 448 saturates.

    Exponents below -127 count as -127, so a group of zeros has byte 0. A NaN makes the byte 255. An infinity makes it
    254 under rceil and 247 under floor, by which 448 stands for more than fp32 holds. ValueError for another rounding.
    """
    if rounding not in ("rceil", "floor"):
        raise ValueError(f"rounding is {rounding!r}, want 'rceil' or 'floor'")
    infinity = 0x7F800000
    # Without their sign, bits order as magnitudes do, and NaN comes last.
    largest = (groups.view(torch.int32) & 0x7FFFFFFF).amax(-1)
    scales = (largest >> 23) - 8
    if rounding == "rceil":
        # 448 is 1.75 * 2^8, and the mantissa bits of 1.75 are 0x600000.
        scales = scales + ((largest & 0x7FFFFF) > 0x600000)
        scales = torch.where(largest == infinity, 254, scales)
    return torch.where(largest > infinity, 255, scales.clamp(0, 254)).to(torch.uint8)


def from_e8m0(scales: torch.Tensor) -> torch.Tensor:
    """uint8 -> fp32 of the same shape, exactly; byte 255 is NaN."""
    exponents = scales.to(torch.int32)
    bits = torch.where(exponents == 0, 0x00400000, exponents << 23)
    return torch.where(exponents == 255, 0x7FC00000, bits).view(torch.float32)


def inverse_e8m0(scales: torch.Tensor) -> torch.Tensor:
    """uint8 -> fp32 of the same shape: one over the scale, exactly (2^-127 for byte 254); byte 255 is NaN."""
    return from_e8m0(torch.where(scales == 255, 255, 254 - scales.to(torch.int32)))
