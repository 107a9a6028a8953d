"""A program as one step of generation."""

from collections.abc import Mapping

import torch
from torch import Tensor

from kimigraph.ir.errors import CompileError
from kimigraph.runtime.executor import Executor

IDS, LENGTHS = "input_ids", "lengths"
"""Outside names of the inputs that a step takes beside its caches."""


class BoundStep:
    """A program over fixed caches: called with tokens and lengths, it updates them and returns the last logits.

    Tokens and lengths go into tensors that stay where they are, so that every call is the same call to the program.
    """

    def __init__(self, executor: Executor, caches: Mapping[str, Tensor]) -> None:
        specs = executor.caller_inputs
        shapes = {spec.source: spec.shape for spec in specs}
        missing = [name for name in shapes if name not in caches and name not in (IDS, LENGTHS)]
        if missing:
            raise CompileError(f"the program takes {', '.join(missing[:5])}, which is no cache of the batch")
        self._executor = executor
        self._ids = torch.zeros(shapes[IDS], dtype=torch.int64, device=executor.device)
        lengths = shapes.get(LENGTHS, shapes[IDS][:1])  # a model without positions has no use for them
        self._lengths = torch.zeros(lengths, dtype=torch.int32, device=executor.device)
        given = {**caches, IDS: self._ids, LENGTHS: self._lengths}
        tensors = [given[spec.source] for spec in specs]
        if not executor.takes_as_given(tensors):
            raise CompileError("the program takes its caches in another layout than that of the batch")
        self._arguments, places = executor.argument_template()
        for place, tensor in zip(places, tensors, strict=True):
            self._arguments[place] = tensor

    def __call__(self, ids: list[list[int]], lengths: list[int]) -> Tensor:
        """Write the tokens ``ids`` [B][S] behind ``lengths`` [B] cached ones; logits [B, V] of the last token."""
        return self.all_logits(ids, lengths)[:, -1]

    def all_logits(self, ids: list[list[int]], lengths: list[int]) -> Tensor:
        """The same; the logits of all tokens that the program gives, [B, S, V] or [B, 1, V]."""
        self._ids.copy_(torch.tensor(ids))
        self._lengths.copy_(torch.tensor(lengths, dtype=torch.int32))
        return self.again()

    def again(self) -> Tensor:
        """The same once more, on the tokens and lengths of the last call."""
        return self._executor.run(self._arguments)[0]
