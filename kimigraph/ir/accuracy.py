"""How far two tensors, or two sets of them, are apart. Imports torch alone."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

TOLERANCE_FP32 = 1e-4
"""Largest relative error of a rewrite in fp32: rounding, and nothing else."""
LOW_PRECISION_FLOOR = 1e-2
"""Tolerance in 16 bits where the rounding error of the program itself is smaller, or no fp32 model can be had."""


def tensor_error(got: torch.Tensor, want: torch.Tensor) -> tuple[float, float]:
    """Largest absolute error, and that over the largest finite magnitude of ``want``; inf where only one is finite."""
    got, want = got.detach().cpu().double(), want.detach().cpu().double()
    if got.shape != want.shape:
        return float("inf"), float("inf")
    if not want.numel():
        return 0.0, 0.0
    same = (got == want) | (got.isnan() & want.isnan())
    difference = torch.where(same, torch.zeros_like(want), (got - want).abs()).nan_to_num(nan=float("inf"))
    scale = torch.where(want.isfinite(), want.abs(), torch.zeros_like(want)).max().item()
    worst = difference.max().item()
    return worst, worst / scale if scale > 0 else worst


@dataclass(frozen=True)
class Deviation:
    """The errors of a set of tensors; ``tensor`` is the one with the largest relative error for its ``tolerance``."""

    absolute: float = 0.0
    relative: float = 0.0
    tensor: str = ""
    tolerance: float = TOLERANCE_FP32

    @property
    def excess(self) -> float:
        """Relative error over tolerance: above 1 is a failure."""
        return self.relative / self.tolerance

    @property
    def passed(self) -> bool:
        """Whether every tensor is within its tolerance."""
        return self.excess <= 1

    def against_eager(self, outputs: int) -> dict[str, Any]:
        """What the document of an export says of its ``outputs``, held against the eager model's."""
        return {
            "max_abs_err": self.absolute,
            "max_rel_err": self.relative,
            "tolerance": self.tolerance,
            "passed": self.passed,
            "reference": "eager",
            "outputs": outputs,
        }

    def __str__(self) -> str:
        name = f"{self.tensor} differs by " if self.tensor else ""
        return f"{name}{self.absolute:.3g} absolute, {self.relative:.3g} relative; tolerance {self.tolerance:.3g}"


def deviation(
    got: Mapping[str, torch.Tensor],
    want: Mapping[str, torch.Tensor],
    tolerance: float = TOLERANCE_FP32,
    tolerances: Mapping[str, float] | None = None,
) -> Deviation:
    """Compare all tensors of ``want``; one that ``got`` lacks, or has in another dtype, is infinitely far off."""
    found = [Deviation(tolerance=tolerance)]
    for name, value in want.items():
        other = got.get(name)
        missing = other is None or other.dtype != value.dtype
        error = (float("inf"), float("inf")) if missing or other is None else tensor_error(other, value)
        found.append(Deviation(*error, name, (tolerances or {}).get(name, tolerance)))
    worst = max(found, key=lambda item: item.excess)
    absolute = max(item.absolute for item in found)
    return Deviation(absolute, worst.relative, worst.tensor, worst.tolerance)
