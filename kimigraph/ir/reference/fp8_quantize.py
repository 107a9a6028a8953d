"""Reference of ``kimigraph::fp8_quantize``."""

import torch

from kimigraph.ir.reference.cache_bytes import quantise
from kimigraph.ir.reference.hadamard import hadamard_rotated


def fp8_quantize(
    x: torch.Tensor, *, tile: int = 128, scales: str = "power2", rotate: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``kimigraph.ir.operators.fp8_quantize``: values over their tile's fp32 scale, rounded once."""
    fp8_tile_count(x, tile, scales)
    return quantise(hadamard_rotated(x) if rotate else x, tile, scales)


def fp8_tile_count(x: torch.Tensor, tile: int, scales: str) -> int:
    """How many scales a row of ``x`` has; ValueError for what cannot be quantised."""
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16) or x.dim() == 0:
        raise ValueError(f"fp8_quantize: x is {x.dtype} {list(x.shape)}, want rows of float32, bfloat16 or float16")
    if tile < 1:
        raise ValueError(f"fp8_quantize: tile is {tile}, want at least 1")
    if scales not in ("power2", "amax"):
        raise ValueError(f"fp8_quantize: scales is {scales!r}, want 'power2' or 'amax'")
    return -(-x.shape[-1] // tile)
