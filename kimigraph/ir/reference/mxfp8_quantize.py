"""Reference of ``kimigraph::mxfp8_quantize``, and its inverse."""

import torch

from kimigraph.ir.reference.e4m3 import from_e4m3, to_e4m3
from kimigraph.ir.reference.e8m0 import e8m0_scales, from_e8m0, inverse_e8m0
from kimigraph.ir.reference.groups import join_groups, split_groups
from kimigraph.ir.reference.hadamard import hadamard_rotated


def mxfp8_quantize(
    x: torch.Tensor, *, group: int = 32, rounding: str = "rceil", rotate: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``kimigraph.ir.operators.mxfp8_quantize``: values times the inverse scale in fp32, rounded once."""
    mxfp8_group_count(x, group, rounding)
    x = hadamard_rotated(x) if rotate else x
    groups = split_groups(x.float().clone(memory_format=torch.contiguous_format), group)
    scales = e8m0_scales(groups, rounding)
    # A NaN scale makes every element of its group NaN: a reader that forgets the scale cannot take them for numbers.
    elements = to_e4m3(groups * inverse_e8m0(scales).unsqueeze(-1))
    return join_groups(elements.view(torch.uint8), x.shape[-1]), scales


def mxfp8_dequantize(values: torch.Tensor, scales: torch.Tensor, *, group: int = 32) -> torch.Tensor:
    """uint8 or float8_e4m3fn [..., D] and uint8 [..., ceil(D / group)] -> fp32 [..., D].

    Exact but where a product exceeds fp32, which gives infinity; a group of scale 255 is NaN. ValueError for scales
    of another shape, or values of another type.
    """
    wanted = (*values.shape[:-1], -(-values.shape[-1] // group))
    if scales.shape != wanted or scales.dtype != torch.uint8:
        raise ValueError(f"scales are {scales.dtype} {list(scales.shape)}, want torch.uint8 {list(wanted)}")
    groups = split_groups(from_e4m3(values), group)
    return join_groups(groups * from_e8m0(scales).unsqueeze(-1), values.shape[-1])


def mxfp8_group_count(x: torch.Tensor, group: int, rounding: str) -> int:
    """How many scales a row of ``x`` has; ValueError for what cannot be quantised."""
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"mxfp8_quantize: x is {x.dtype}, want torch.float32, torch.bfloat16 or torch.float16")
    if x.dim() == 0:
        raise ValueError("mxfp8_quantize: x has no dim to group")
    if group < 1:
        raise ValueError(f"mxfp8_quantize: group is {group}, want at least 1")
    if rounding not in ("rceil", "floor"):
        raise ValueError(f"mxfp8_quantize: rounding is {rounding!r}, want 'rceil' or 'floor'")
    return -(-x.shape[-1] // group)
