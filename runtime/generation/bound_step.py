"""A program as one step of generation."""

from collections.abc import Mapping

import torch
from torch import Tensor

from kimigraph.ir.errors import CompileError
from kimigraph.runtime.executor import Executor

IDS, LENGTHS, HIDDEN = "input_ids", "lengths", "hidden"
"""Outside names of the inputs that a step takes beside its caches; the last one in a layer for drafts alone."""


class BoundStep:
    """A program over fixed caches: called with tokens and lengths, it updates them and returns the last logits.

    Tokens and lengths go into tensors that stay where they are, so that every call is the same call to the program.
    ``hidden_states`` are those of the last call, of a program that gives them.
    """

    hidden_states: Tensor

    def __init__(self, executor: Executor, caches: Mapping[str, Tensor]) -> None:
        specs = executor.caller_inputs
        shapes = {spec.source: spec.shape for spec in specs}
        missing = [name for name in shapes if name not in caches and name not in (IDS, LENGTHS, HIDDEN)]
        if missing:
            raise CompileError(f"the program takes {', '.join(missing[:5])}, which is no cache of the batch")
        self._executor = executor
        self._ids = torch.zeros(shapes[IDS], dtype=torch.int64, device=executor.device)
        lengths = shapes.get(LENGTHS, shapes[IDS][:1])  # a model without positions has no use for them
        self._lengths = torch.zeros(lengths, dtype=torch.int32, device=executor.device)
        given = {**caches, IDS: self._ids, LENGTHS: self._lengths}
        if HIDDEN in shapes:
            spec = next(spec for spec in specs if spec.source == HIDDEN)
            self._hidden = given[HIDDEN] = torch.zeros(
                spec.shape, dtype=getattr(torch, spec.dtype), device=executor.device
            )
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

    def after(self, ids: list[list[int]] | Tensor, lengths: list[int] | Tensor, hidden: Tensor) -> Tensor:
        """The same of a layer that takes the ``hidden`` states [B, S, hidden size] of the tokens before ``ids``.

        Tensors are taken where they are: nothing waits for the device.
        """
        self._hidden.copy_(hidden)
        self._ids.copy_(torch.as_tensor(ids))
        self._lengths.copy_(torch.as_tensor(lengths))
        return self.again()

    def again(self) -> Tensor:
        """The same once more, on the tokens and lengths of the last call."""
        logits, *hidden = self._executor.run(self._arguments)
        if hidden:
            self.hidden_states = hidden[0]
        return logits
