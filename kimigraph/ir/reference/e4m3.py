"""E4M3, the 8-bit floating-point type of the OCP OFP8 specification: 4 exponent bits, 3 mantissa bits, no infinity.

The variant is ``fn``: bias 7, largest value 448 (0x7E), smallest 2^-9 (0x01), NaN 0x7F and 0xFF, both zeros.
"""

import torch


def to_e4m3(values: torch.Tensor, overflow: str = "saturate") -> torch.Tensor:
    """fp32, bf16 or fp16 -> float8_e4m3fn of the same shape, rounded once, to nearest with ties to even.

    Magnitudes that round beyond 448 (above 464; 464 itself ties to 448), infinities among them, become 448 of their
    sign under ``overflow`` saturate and NaN under nan. NaN becomes 0x7F whatever its sign, as the conversion
    instructions of GPUs make it. Torch's own cast is not relied on beyond 448: its versions differ there. ValueError
    for another ``overflow``.
    """
    if overflow not in ("saturate", "nan"):
        raise ValueError(f"overflow is {overflow!r}, want 'saturate' or 'nan'")
    wide = values.float()
    lost = wide.isnan() | (wide.abs() > 464.0) if overflow == "nan" else wide.isnan()
    return torch.where(lost, float("nan"), wide.clamp(-448.0, 448.0)).to(torch.float8_e4m3fn)


def from_e4m3(values: torch.Tensor) -> torch.Tensor:
    """float8_e4m3fn, or uint8 that holds its codes -> fp32 of the same shape, exactly.

    ValueError for another type: the codes of float8_e4m3fnuz, for one, mean half as much.
    """
    if values.dtype not in (torch.uint8, torch.float8_e4m3fn):
        raise ValueError(f"values are {values.dtype}, want torch.float8_e4m3fn or its codes as torch.uint8")
    return values.contiguous().view(torch.float8_e4m3fn).float()
