"""Seeded prompts: the inputs of step after step of a program, from empty caches on."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from kimigraph.capture import ModelSource
from kimigraph.capture.program import tensors_of
from kimigraph.ir.program import CapturedProgram, InputSpec
from kimigraph.ir.seeded import seeded_tensor


class Prompts:
    """Steps of ``program``, the captured graph of ``model``; a source that gives its own inputs has one step of them.

    Sequences start empty and take random tokens, the same for every program that they are given to.
    """

    def __init__(self, model: ModelSource, program: CapturedProgram, steps: int, seed: int) -> None:
        self._model, self._program, self._seed = model, program, seed
        shape = model.shape
        self.steps = 1 if shape is None else max(1, min(steps, shape.context // shape.tokens))
        self._tokens = 1 if shape is None else shape.tokens

    def start(self) -> dict[str, torch.Tensor]:
        """The tensors that a sequence starts with, by source: weights, and caches with nothing in them."""
        if self._model.shape is None:
            _, args, kwargs = self._model.build()
            given = tensors_of(self._program, args, kwargs)
            return {spec.source: t.clone() for spec, t in zip(self._program.inputs, given, strict=True)}
        tensors = {spec.source: self._program.tensors[spec.name] for spec in self._program.inputs if spec.bound}
        for spec in self._program.inputs:
            if not spec.bound:
                dtype = getattr(torch, spec.dtype)
                tensors[spec.source] = torch.empty_strided(spec.shape, spec.stride, dtype=dtype).zero_()
        return tensors

    def inputs(self, inputs: Sequence[InputSpec]) -> Iterator[Mapping[str, torch.Tensor]]:
        """What changes from step to step among ``inputs``, by source."""
        for step in range(self.steps):
            yield {} if self._model.shape is None else dict(self._step(inputs, step))

    def _step(self, inputs: Sequence[InputSpec], step: int) -> Iterator[tuple[str, torch.Tensor]]:
        for spec in inputs:
            if spec.kind != "input" or spec.mutated:
                continue
            hint = self._model.hints.inputs.get(spec.source)
            if hint is not None and hint.is_length:
                yield spec.source, torch.full(spec.shape, step * self._tokens, dtype=getattr(torch, spec.dtype))
            else:
                fresh = replace(spec, source=f"{spec.source} of step {step}")
                dtype = getattr(torch, spec.dtype)
                yield (
                    spec.source,
                    seeded_tensor(fresh.source, spec.shape, dtype, "input", self._seed, spec.value_range),
                )
