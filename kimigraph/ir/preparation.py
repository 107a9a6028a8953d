"""Weights that are made once, when a program is bound, from those of the model: steps, and how they are done.

A step is plain JSON: ``{"op": "cat", "dim": 0, "of": [source names]}``, ``{"op": "cast", "dtype": "float32", "of":
[source name]}`` or ``{"op": "hadamard", "width": 128, "of": [source name]}`` (``hadamard_rows`` of that name). An
artifact carries this file's text as ``support/preparation.py``, so it imports torch alone.
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


def names_read(steps: Sequence[Mapping[str, Any]]) -> list[str]:
    """The source names that the steps read, in order."""
    return [name for step in steps for name in step["of"]]
