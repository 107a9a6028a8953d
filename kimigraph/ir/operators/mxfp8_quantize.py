"""``mxfp8_quantize``: values as E4M3 under one power of two for each group of the last dim, as OCP MX 1.0 has them.

    scale_g = the power of two for amax_g = max |x_i| over group g
    bytes_i = e4m3(x_i / scale_g)              to nearest, ties to even, saturating at 448

Shapes: ``x`` [..., D] in float32, bfloat16 or float16, widened to fp32 first. Returns ``bytes`` uint8 [..., D], codes
of E4M3 (fn), and ``scales`` uint8 [..., ceil(D / group)], E8M0: byte b is 2^(b - 127), 255 is NaN; both contiguous.
``group`` is 32 in MX; any size of at least 1 goes, and where it does not divide D the last group is short.

``rounding`` rceil takes the smallest power of two with amax / scale <= 448, so nothing saturates; floor takes
2^(floor(log2 amax) - 8), the conversion of section 6.3, where values up to 512 scaled saturate. Either is read from the
bits of amax, no logarithm taken. Exponents stop at -127: a group of zeros has byte 0 and keeps its zeros with their
signs; groups so small that the scale stops there are scaled by 2^127 and keep what E4M3 keeps of them.

With ``rotate`` the rows are turned first: times the Hadamard matrix in Sylvester's order over sqrt(D), D a power of
two, summed in fp64 and rounded to fp32 once.

A NaN in a group makes its scale 255 and all its elements NaN (0x7F). Infinities, which MX leaves to implementations,
saturate: the scale is 254 under rceil and 247 under floor, and read back in fp32 they are infinite again; finite
values beside them mostly vanish. Values near the largest of fp32 may round up to infinity when read back.

Source: OCP Microscaling Formats (MX) 1.0; rceil as in cuBLAS's block scaling. Errors: ValueError for a type, a group or
a rounding other than these.
"""

import torch

from kimigraph.ir.operators.registry import Cost, Operator, nbytes, register
from kimigraph.ir.operators.shapes import check_power_of_two
from kimigraph.ir.reference.mxfp8_quantize import mxfp8_group_count, mxfp8_quantize

_NAME = "mxfp8_quantize"


def _fake(
    x: torch.Tensor, *, group: int = 32, rounding: str = "rceil", rotate: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    count = mxfp8_group_count(x, group, rounding)
    check_power_of_two(_NAME, x.shape[-1], rotate)
    scales = x.new_empty((*x.shape[:-1], count), dtype=torch.uint8)
    return x.new_empty(x.shape, dtype=torch.uint8), scales


def _cost(x: torch.Tensor, *, group: int = 32, rounding: str = "rceil", rotate: bool = False) -> Cost:
    written = x.numel() + x.shape[:-1].numel() * mxfp8_group_count(x, group, rounding)
    turning = x.numel() * x.shape[-1].bit_length() if rotate else 0
    return Cost(bytes=nbytes(x) + written, flops=3 * x.numel() + turning)


OPERATOR = register(
    Operator(
        name=_NAME,
        signature=(
            '(Tensor x, *, int group=32, str rounding="rceil", bool rotate=False) -> (Tensor bytes, Tensor scales)'
        ),
        summary="MXFP8: E4M3 elements under a power of two for each group",
        documentation=__doc__,
        reference=mxfp8_quantize,
        fake=_fake,
        cost=_cost,
    )
)
