"""The graphs of one program: one for each set of caches that its steps come with."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import torch

from kimigraph.ir.errors import UsageError
from kimigraph.runtime.executor import Executor, laid_out
from kimigraph.runtime.graphs.refusal import GraphCaptureError, program_name, refusal, without_graph
from kimigraph.runtime.graphs.results import Result, results_of
from kimigraph.runtime.graphs.shelf import Shelf

Addresses = tuple[int, ...]
REMEMBERED = 8
"""Sets of tensors that have come once, and would be captured if they came again."""

MOVING = 16
"""Steps in a row without a graph, after which a warning says why."""


@dataclass(frozen=True)
class Captured:
    """A graph over tensors at known addresses."""

    replay: Callable[[], None]
    results: tuple[Result, ...]


class ProgramGraphs:
    """Takes the steps of one executor: by a graph where there is one for the tensors that come.

    Tensors are in place, known by their addresses (caches, states, weights), or copied into ``buffers`` (the rest).
    """

    def __init__(self, executor: Executor, shelf: Shelf, optional: bool = False) -> None:
        self.manifest, self._optional = executor.manifest, optional
        self._step, self._shelf, self._device = executor.step, shelf, executor.device
        specs = list(enumerate(self.manifest.inputs))
        self._copied = [place for place, spec in specs if spec.kind == "input" and not spec.mutated]
        self._in_place = [place for place, spec in specs if spec.kind != "input" or spec.mutated]
        self._written = [place for place, spec in specs if spec.mutated]
        self.buffers: dict[int, torch.Tensor] = {}
        self._graphs: dict[Addresses, Captured] = {}
        self._seen: OrderedDict[Addresses, None] = OrderedDict()
        self._refusal: GraphCaptureError | None = None
        self._warm, self._latest, self._bare = False, Addresses(), 0

    @torch.no_grad()
    def __call__(self, arguments: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """One step."""
        if self._optional and self._refusal is not None:
            return self._step(*arguments)
        self._refuse_nested()
        with self._shelf.device.turn:
            addresses = self._addresses(arguments)
            captured = self._graphs.get(addresses)
            if captured is None:
                if addresses not in self._seen:
                    return self._first(arguments, addresses)
                try:
                    captured = self._capture(arguments, addresses)
                except GraphCaptureError as error:
                    if not self._optional:
                        raise
                    self._shelf.warn(without_graph(error))
                    return self._step(*arguments)
            self._bare = 0
            return self._replay(captured, arguments, addresses)

    @torch.no_grad()
    def prepare(self, arguments: list[torch.Tensor]) -> None:
        """Capture a step on ``arguments`` without a step on them: what has to run once runs on copies."""
        self._refuse_nested()
        with self._shelf.device.turn:
            addresses = self._addresses(arguments)
            if addresses in self._graphs:
                return
            if not self._warm:
                self._step(*self._scratch(arguments))
                self._warm = True
            self._capture(arguments, addresses)

    def _drop(self, addresses: Addresses) -> str:
        """Let go of the graph over these tensors; returns the program's name."""
        self._graphs.pop(addresses, None)
        self._seen.pop(addresses, None)
        return program_name(self.manifest)

    def _refuse_nested(self) -> None:
        if self._refusal is not None:
            raise self._refusal
        if self._shelf.device.capturing():
            raise UsageError(
                f"{program_name(self.manifest)} runs in graph mode and was called inside a capture of the caller's: "
                "two graphs would share its memory. Leave cuda_graph out to capture the step in a graph of your own"
            )

    def _addresses(self, arguments: list[torch.Tensor]) -> Addresses:
        return tuple([arguments[place].data_ptr() for place in self._in_place])

    def _first(self, arguments: list[torch.Tensor], addresses: Addresses) -> tuple[torch.Tensor, ...]:
        """A step without a graph, on tensors that were not seen lately."""
        while len(self._seen) >= max(REMEMBERED, self._shelf.most):
            self._seen.popitem(last=False)
        self._seen[addresses] = None
        self._bare += 1
        if self._bare == MOVING:
            moved = self._moved(addresses, self._latest)
            self._shelf.warn(
                f"{program_name(self.manifest)}: {MOVING} steps in a row ran without a CUDA graph, as each came with "
                f"other tensors ({moved}). Keep caches and states in place from step to step, or leave cuda_graph out"
            )
        outputs = self._step(*arguments)
        self._warm, self._latest = True, addresses
        return outputs

    def _capture(self, arguments: list[torch.Tensor], addresses: Addresses) -> Captured:
        self._shelf.make_room()
        moved = self._moved(addresses, next(reversed(self._graphs), ()))
        given = list(arguments)
        for place in self._copied:
            given[place] = self._buffer(place)
        try:
            replay, outputs = self._shelf.device.capture(lambda: self._step(*given))
        except Exception as error:
            self._refusal = refusal(self.manifest, error)
            raise self._refusal from error
        captured = Captured(replay, results_of(outputs, given, self._shelf.reuse_outputs))
        self._graphs[addresses] = captured
        self._shelf.add((id(self), addresses), lambda: self._drop(addresses))
        why = f": other tensors than before ({moved})" if moved else ""
        self._shelf.remarks.append(f"{program_name(self.manifest)}: captured as a CUDA graph{why}")
        return captured

    def _replay(
        self, captured: Captured, arguments: list[torch.Tensor], addresses: Addresses
    ) -> tuple[torch.Tensor, ...]:
        for place in self._copied:
            buffer, given = self.buffers[place], arguments[place]
            if buffer.data_ptr() != given.data_ptr():
                buffer.copy_(given)
        captured.replay()
        self._shelf.note_use((id(self), addresses))
        return tuple([result.of(arguments) for result in captured.results])

    def _moved(self, addresses: Addresses, before: Addresses) -> str:
        """The names of tensors that lie elsewhere than ``before``, which is empty where nothing was."""
        pairs = zip(self._in_place, before, addresses, strict=False)
        names = [self.manifest.inputs[place].source for place, old, new in pairs if old != new]
        return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")

    def _buffer(self, place: int) -> torch.Tensor:
        """The buffer of an input; all graphs of the program have the same."""
        if place not in self.buffers:
            spec = self.manifest.inputs[place]
            with torch.inference_mode(False):  # made under inference mode it could not be written outside it
                self.buffers[place] = torch.empty_strided(
                    spec.shape, spec.stride, dtype=getattr(torch, spec.dtype), device=self._device
                )
        return self.buffers[place]

    def _scratch(self, arguments: list[torch.Tensor]) -> list[torch.Tensor]:
        """The arguments with copies of those that a step writes."""
        scratch = list(arguments)
        try:
            for place in self._written:
                scratch[place] = laid_out(arguments[place], self.manifest.inputs[place])
        except torch.cuda.OutOfMemoryError as error:
            raise UsageError(
                f"{program_name(self.manifest)}: no memory for copies of its caches to warm up on: run one step before "
                "the capture, which needs none then"
            ) from error
        return scratch
