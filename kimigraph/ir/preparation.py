"""Weights that are made once, when a program is bound, from those of the model: steps, and how they are done.

A step is plain JSON: ``{"op": "cat", "dim": 0, "of": [source names]}``, ``{"op": "cast", "dtype": "float32", "of":
[source name]}``, ``{"op": "hadamard", "width": 128, "of": [source name]}`` (``hadamard_rows`` of that name) or
``{"op": "mxfp4", "of": [source name]}`` (``mxfp4_quantize``). An artifact carries this file's text as
``support/preparation.py``, so it imports torch alone.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch


def prepare(steps: Sequence[Mapping[str, Any]], tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The tensor that ``steps`` make of ``tensors`` (by source name). ValueError for a step of another version."""
    [step] = steps
    parts = [tensors[name] for name in step["of"]]
    if step["op"] == "cat":
        return torch.cat(parts, dim=step["dim"])
    if step["op"] == "cast":
        return parts[0].to(getattr(torch, step["dtype"]))
    if step["op"] == "hadamard":
        return _hadamard_rows(parts[0], step["width"])
    if step["op"] == "mxfp4":
        return _mxfp4(parts[0])
    raise ValueError(f"{step} is no preparation that this version knows: compile the program again")


def _hadamard_rows(weight: torch.Tensor, width: int) -> torch.Tensor:
    """The operator of that name, here once more for programs that have torch alone."""
    mixed, step = weight.double().unflatten(0, (-1, width)), 1
    while step < width:
        pairs = mixed.unflatten(1, (width // (2 * step), 2, step))
        first, second = pairs[:, :, 0], pairs[:, :, 1]
        mixed = torch.stack([first + second, first - second], dim=2).flatten(1, 3)
        step *= 2
    return (mixed * width**-0.5).flatten(0, 1).to(weight.dtype)


def _mxfp4(weight: torch.Tensor) -> torch.Tensor:
    """``mxfp4_quantize``, here once more; matrix by matrix, which bounds the memory that it takes."""
    matrices = weight.reshape(-1, *weight.shape[-2:])
    row = weight.shape[-1] // 32 * 17
    packed = torch.empty((len(matrices), weight.shape[-2] * row), dtype=torch.uint8, device=weight.device)
    halfway = ((0.25, False), (0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False))
    for matrix, out in zip(matrices, packed, strict=True):
        groups = matrix.float().reshape(-1, 32)
        largest = (groups.view(torch.int32) & 0x7FFFFFFF).amax(-1)
        scales = torch.where(largest > 0x7F800000, 255, ((largest >> 23) - 2).clamp(0, 254))
        inverse = torch.where(scales == 254, 0x00400000, (254 - scales) << 23).view(torch.float32)
        values = groups * torch.where(scales == 255, torch.nan, inverse).unsqueeze(-1)
        codes = torch.zeros_like(values, dtype=torch.uint8)
        for middle, up in halfway:  # ties to even
            codes += (values.abs() >= middle if up else values.abs() > middle).to(torch.uint8)
        codes |= (values.signbit() & ~values.isnan()).to(torch.uint8) << 3
        pairs = (codes[:, ::2] | codes[:, 1::2] << 4).flatten()
        torch.cat([pairs, scales.to(torch.uint8)], out=out)
    return packed.view(*weight.shape[:-1], row)


def names_read(steps: Sequence[Mapping[str, Any]]) -> list[str]:
    """The source names that the steps read, in order."""
    return [name for step in steps for name in step["of"]]
