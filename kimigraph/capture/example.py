"""The tensors of one example step, seeded by name."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kimigraph.capture.hints import InputHint
from kimigraph.capture.shape import StepShape
from kimigraph.ir.seeded import seeded_tensor


@dataclass(frozen=True)
class StepInput:
    """One tensor that the caller gives to a step: its outside name, what it looks like, and what it is."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    hint: InputHint


@dataclass(frozen=True)
class StepExample:
    """Seeded tensors for steps of ``shape``; ``settle(tensors, length)`` makes them agree with that many tokens."""

    shape: StepShape
    inputs: tuple[StepInput, ...]
    seed: int
    settle: Callable[[dict[str, Tensor], int], None] | None = None

    def tensors(self, length: int | None) -> dict[str, Tensor]:
        """New tensors by name: the seeded ones of scripts and artifacts, counters at ``length``."""
        length = self.shape.checked_length(length)
        made = {
            item.name: seeded_tensor(
                item.name, item.shape, item.dtype, item.hint.kind, self.seed, item.hint.value_range
            )
            for item in self.inputs
        }
        for item in self.inputs:
            if item.hint.is_length:
                made[item.name].fill_(length)
        if self.settle is not None:
            self.settle(made, length)
        return made
