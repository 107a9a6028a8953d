"""Seeded tensors and checksums: the same numbers in every process, script and artifact. Imports torch alone.

Printed scripts carry this file's text, so it must stay self-contained.
"""

import hashlib
from collections.abc import Sequence

import torch


def generator(seed: int, name: str) -> torch.Generator:
    """A CPU generator seeded with (``seed``, ``name``)."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def seeded_tensor(
    name: str,
    shape: Sequence[int],
    dtype: torch.dtype,
    kind: str = "input",
    seed: int = 0,
    value_range: Sequence[int] | None = None,
) -> torch.Tensor:
    """The seeded tensor of that name.

    Weights are N(0, 1/fan_in) with fan_in the last dim (also of stacked experts and of depthwise filters),
    one-dimensional ones whose name says norm 1 + 0.1 N, other one-dimensional ones 0.1 N, ``A_log`` U[0, 1]. Caches,
    states and float inputs are N(0, 1).
    Integers are uniform over ``value_range`` (low inclusive, high exclusive), booleans True.
    """
    random = generator(seed, name)
    if dtype == torch.bool:
        return torch.ones(shape, dtype=dtype)
    if not dtype.is_floating_point:
        low, high = value_range or (0, 2)
        return torch.randint(low, max(high, low + 1), shape, generator=random, dtype=dtype)
    if kind == "weight" and name.endswith("A_log"):
        return torch.rand(shape, generator=random).to(dtype)
    values = torch.randn(shape, generator=random)
    if kind == "weight":
        if len(shape) > 1:
            values *= max(shape[-1], 1) ** -0.5
        else:
            values = 1 + 0.1 * values if "norm" in name and not name.endswith("bias") else 0.1 * values
    return values.to(dtype)


def checksum(name: str, tensor: torch.Tensor, seed: int = 0) -> list[float]:
    """Three float64 numbers: sum, sum of magnitudes, dot with a vector seeded by the output's name.

    Non-finite entries and entries beyond 1e30 (masked positions) count as zero, so that the sums can be compared.
    """
    values = tensor.detach().to("cpu", torch.float64).flatten()
    values = torch.where(values.isfinite() & (values.abs() < 1e30), values, torch.zeros_like(values))
    probe = torch.randn(values.shape, generator=generator(seed, name), dtype=torch.float64)
    return [values.sum().item(), values.abs().sum().item(), (values @ probe).item()]


def same_checksum(got: Sequence[float], want: Sequence[float], tolerance: float) -> bool:
    """Whether two checksums agree: each number within ``tolerance`` times the sum of magnitudes."""
    scale = max(abs(want[1]), 1e-12)
    return all(abs(a - b) <= tolerance * scale for a, b in zip(got, want, strict=True))
