"""The seeded data on which two graphs are compared: chosen so that a wrong rewrite shows.

One set of random numbers hides much: a limit that is off by one while the caches are full, a lost epsilon beside
large values, a lost update that only the next step reads. So there are several, each runs for two steps, and every
tensor that a step updates is compared.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kimigraph.ir.program import InputSpec
from kimigraph.ir.script import make_inputs
from kimigraph.ir.seeded import seeded_tensor

STEPS = 2
"""Steps of a run; the second finds the caches as the first left them."""
_NEXT_STEP = 1_000_003


@dataclass(frozen=True)
class DataSet:
    """One choice of tensors.

    ``fill`` sets counters (integer inputs of at most one dim, such as lengths) to that fraction of their range, the
    same for all rows; None leaves each row its own seeded value. ``scale`` multiplies caches, float inputs and weight
    matrices. Small numbers make epsilons count; factors drawn tensor by tensor would do so for more of them, but make
    deep models so sensitive that rounding fails.
    """

    name: str
    seed: int
    fill: float | None = None
    scale: float = 1.0


def data_sets(seed: int = 0) -> tuple[DataSet, ...]:
    """Rows of their own lengths; empty caches; full ones; numbers so small that epsilons count."""
    return (
        DataSet("mixed", seed),
        DataSet("empty", seed + 1, fill=0.0),
        DataSet("full", seed + 2, fill=1.0),
        DataSet("small", seed + 3, fill=0.5, scale=2.0**-3),
    )


def make_data(data: DataSet, inputs: Sequence[InputSpec], constants: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """A tensor for every input, in order; ``constants`` by source name."""
    tensors = make_inputs(inputs, constants, data.seed)
    for spec, tensor in zip(inputs, tensors, strict=True):
        if _is_counter(spec) and data.fill is not None and spec.value_range is not None:
            low, high = _counter_range(spec.value_range)
            tensor.fill_(low + int(data.fill * (high - 1 - low)))
        elif tensor.is_floating_point() and _is_scaled(spec):
            tensor.mul_(data.scale)
    return tensors


def run_steps(
    step: Callable[..., Sequence[Any]],
    data: DataSet,
    inputs: Sequence[InputSpec],
    tensors: Sequence[torch.Tensor],
    outputs: Sequence[str],
    steps: int = STEPS,
) -> dict[str, torch.Tensor]:
    """Run ``step`` on copies of ``tensors`` and return outputs and updated inputs of every step by name.

    Names are those of ``outputs`` and sources of inputs, with `` at step N`` behind them.
    """
    current = [t if spec.bound and not spec.mutated else t.clone() for spec, t in zip(inputs, tensors, strict=True)]
    values: dict[str, torch.Tensor] = {}
    for number in range(1, steps + 1):
        results = step(*current)
        for name, value in zip(outputs, results, strict=True):
            values[f"{name} at step {number}"] = value.clone()
        for place, spec in enumerate(inputs):
            if spec.mutated:
                values[f"{spec.source} at step {number}"] = current[place].clone()
                if _is_counter(spec):  # a step more would run over the caches' end
                    current[place] = tensors[place].clone()
            elif spec.kind == "input" and not _is_counter(spec):
                current[place] = _fresh(spec, current[place], data.seed + number * _NEXT_STEP)
    return values


def _fresh(spec: InputSpec, like: torch.Tensor, seed: int) -> torch.Tensor:
    values = seeded_tensor(spec.source, spec.shape, like.dtype, spec.kind, seed, spec.value_range)
    return torch.empty_like(like).copy_(values)


def _is_counter(spec: InputSpec) -> bool:
    return not spec.bound and spec.value_range is not None and len(spec.shape) <= 1


def _counter_range(seeded: tuple[int, int]) -> tuple[int, int]:
    """What a counter may be. One with a single seeded value, so that all counters agree, starts at 0 as well."""
    low, high = seeded
    return (0, high) if high == low + 1 else (low, high)


def _is_scaled(spec: InputSpec) -> bool:
    return spec.kind in ("cache", "input") or (spec.kind == "weight" and len(spec.shape) > 1)
