"""Weights that are made once, when a program is bound, from those of the model: steps, and how they are done.

A step is plain JSON: ``{"op": "cat", "dim": 0, "of": [source names]}`` or ``{"op": "cast", "dtype": "float32", "of":
[source name]}``. An artifact carries this file's text as ``support/preparation.py``, so it imports torch alone.
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
    raise ValueError(f"{step} is no preparation that this version knows: compile the program again")


def names_read(steps: Sequence[Mapping[str, Any]]) -> list[str]:
    """The source names that the steps read, in order."""
    return [name for step in steps for name in step["of"]]
