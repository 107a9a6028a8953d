"""The stages of a pipeline: which layers each has, and what crosses from one to the next.

A layer is told by the names that its weights, caches and states have outside. A stage's program takes what arrives as
inputs and returns what it makes for later stages as outputs, both under the same names (``boundary.<node>``); its
manifest says both (``info["pipeline"]``), and what only passes through a stage is no part of its program.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from math import prod
from typing import Any

import torch

from kimigraph.ir.errors import UsageError

BOUNDARY = "boundary."
"""What the outside names of values that cross from stage to stage begin with."""
_LAYER = re.compile(r"(?:^|\.)(?:layers|cache|state)\.(\d+)\.")


def directory_of(stage: int) -> str:
    """The directory of a stage's program in that of the pipeline."""
    return f"stage-{stage}"


def layer_of(source: str) -> int | None:
    """The decoder layer that a weight, cache or state of that outside name belongs to; None for what none has."""
    found = _LAYER.search(source)
    return None if found is None else int(found[1])


def layers_of(sources: Sequence[str]) -> int:
    """How many decoder layers a model with tensors of those names has."""
    return 1 + max((layer for source in sources if (layer := layer_of(source)) is not None), default=-1)


def layer_spans(layers: int, stages: int) -> list[tuple[int, int]]:
    """First layer and the one behind the last of each stage: as even as can be, the last stages have one less.

    The last has the head beside its layers. UsageError where there are more stages than layers.
    """
    if stages > layers:
        raise UsageError(f"pp {stages}: the model has {layers} layers, and each stage needs one; give pp 1 to {layers}")
    each, more = divmod(layers, stages)
    starts = [stage * each + min(stage, more) for stage in range(stages + 1)]
    return list(pairwise(starts))


@dataclass(frozen=True)
class Crossing:
    """A value that crosses a boundary: its name, shape and type."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        """Its size."""
        return prod(self.shape) * self.type.itemsize

    @property
    def type(self) -> torch.dtype:
        """Its type."""
        found: torch.dtype = getattr(torch, self.dtype)
        return found


@dataclass(frozen=True)
class Stage:
    """One stage of ``stages``: its layers, what arrives from the stage before, and what goes to the one behind."""

    number: int
    stages: int
    layers: tuple[int, int]
    receives: tuple[Crossing, ...] = ()
    sends: tuple[Crossing, ...] = ()

    @property
    def passes_on(self) -> tuple[Crossing, ...]:
        """What arrives and goes on, for a later stage."""
        return tuple(item for item in self.sends if item in self.receives)

    @property
    def is_last(self) -> bool:
        """Whether the results of the model are this stage's."""
        return self.number == self.stages - 1

    def as_info(self) -> dict[str, Any]:
        """As plain JSON values, for a program's ``info``."""
        return asdict(self)

    @classmethod
    def of(cls, info: Mapping[str, Any]) -> "Stage | None":
        """The stage that a program or manifest with that ``info`` is; None for a program of all layers."""
        found = info.get("pipeline")
        if found is None:
            return None
        crossings = {
            name: tuple(Crossing(item["name"], tuple(item["shape"]), item["dtype"]) for item in found[name])
            for name in ("receives", "sends")
        }
        first, beyond = found["layers"]
        return cls(found["number"], found["stages"], (first, beyond), **crossings)


def holds(source: str, span: tuple[int, int]) -> bool:
    """Whether a stage with that span of layers has the cache or state of that outside name."""
    layer = layer_of(source)
    return layer is None or span[0] <= layer < span[1]
