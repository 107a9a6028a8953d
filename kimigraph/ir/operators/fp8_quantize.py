"""``fp8_quantize``: values as E4M3 under one fp32 scale for each tile of the last dim, as DeepSeek-V3.2 has them.

    scale_t = max(amax_t, 1e-4) / 448, or under the rule power2 the next power of two; amax_t = max |x_i| over tile t
    values_i = e4m3(x_i / scale_t)             to nearest, ties to even, saturating at 448

Shapes: ``x`` [..., D] in float32, bfloat16 or float16, widened to fp32 first. Returns ``values`` float8_e4m3fn
[..., D] and ``scales`` fp32 [..., ceil(D / tile)], by which values are to be multiplied; both contiguous. Where
``tile`` does not divide D the last tile is short. With ``rotate`` the rows are turned first: times the Hadamard matrix
in Sylvester's order over sqrt(D), D a power of two, summed in fp64 and rounded to fp32 once.

A NaN makes its tile's scale and values NaN; an infinity makes an infinite scale, under which finite values vanish and
the infinity is NaN.

Source: the act_quant kernel of DeepSeek-V3.2-Exp. Errors: ValueError for a type, a tile or a rule other than these.
"""

import torch

from kimigraph.ir.operators.registry import Cost, Operator, nbytes, register
from kimigraph.ir.operators.shapes import check_power_of_two
from kimigraph.ir.reference.fp8_quantize import fp8_quantize, fp8_tile_count

_NAME = "fp8_quantize"


def _fake(
    x: torch.Tensor, *, tile: int = 128, scales: str = "power2", rotate: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    count = fp8_tile_count(x, tile, scales)
    check_power_of_two(_NAME, x.shape[-1], rotate)
    values = x.new_empty(x.shape, dtype=torch.float8_e4m3fn)
    return values, x.new_empty((*x.shape[:-1], count), dtype=torch.float32)


def _cost(x: torch.Tensor, *, tile: int = 128, scales: str = "power2", rotate: bool = False) -> Cost:
    written = x.numel() + 4 * x.shape[:-1].numel() * fp8_tile_count(x, tile, scales)
    turning = x.numel() * x.shape[-1].bit_length() if rotate else 0
    return Cost(bytes=nbytes(x) + written, flops=3 * x.numel() + turning)


OPERATOR = register(
    Operator(
        name=_NAME,
        signature=(
            '(Tensor x, *, int tile=128, str scales="power2", bool rotate=False) -> (Tensor values, Tensor scales)'
        ),
        summary="E4M3 elements under an fp32 scale for each tile",
        documentation=__doc__,
        reference=fp8_quantize,
        fake=_fake,
        cost=_cost,
    )
)
