"""A step of generation that goes through the stages of a pipeline, of which this process is one."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from kimigraph.ir.errors import CompileError
from kimigraph.ir.stages import Crossing, Stage
from kimigraph.runtime.executor import Executor
from kimigraph.runtime.generation.bound_step import IDS, LENGTHS
from kimigraph.runtime.parallel.stage_links import Links, Wait
from kimigraph.runtime.parallel.stage_order import Action, order_of, prove_orders


class StagePart:
    """The program of a stage over the caches of some rows: what arrives for them, and what is sent on.

    Tokens and lengths are the part's own tensors, unless ``caches`` has them.

    What arrives is written where the program reads it. What the program returns is sent from where it lies, and from a
    copy where the next run would write there again (in graph mode).
    """

    def __init__(self, executor: Executor, caches: Mapping[str, Tensor], batch: int, tokens: int) -> None:
        stage = Stage.of(executor.manifest.info)
        if stage is None:
            raise CompileError("the program is one of all layers: compile a stage of a pipeline (pp, stage)")
        self.stage, self.rows, self._executor = stage, batch, executor
        specs = executor.caller_inputs
        self._ids = torch.zeros(batch, tokens, dtype=torch.int64, device=executor.device)
        self._lengths = torch.zeros(batch, dtype=torch.int32, device=executor.device)
        self._arrived = {item.name: self._room(item) for item in stage.receives}
        given = {IDS: self._ids, LENGTHS: self._lengths, **caches, **self._arrived}
        missing = [spec.source for spec in specs if spec.source not in given]
        if missing:
            raise CompileError(f"the program takes {', '.join(missing[:5])}, which is no cache of the stage")
        tensors = [given[spec.source] for spec in specs]
        if not executor.takes_as_given(tensors):
            raise CompileError("the program takes its caches in another layout than that of the batch")
        self._arguments, places = executor.argument_template()
        for place, tensor in zip(places, tensors, strict=True):
            self._arguments[place] = tensor
        self._made: tuple[Tensor, ...] = ()
        self._leaving: tuple[Wait, Sequence[Tensor]] | None = None

    @property
    def arriving(self) -> list[Tensor]:
        """Where the next message is to be written: what was sent on from there has left."""
        self._left()
        return [self._arrived[item.name] for item in self.stage.receives]

    def load(self, ids: list[list[int]], lengths: list[int]) -> None:
        """The tokens and lengths of the next run."""
        self._ids.copy_(torch.tensor(ids))
        self._lengths.copy_(torch.tensor(lengths, dtype=torch.int32))

    def run(self) -> None:
        """The program, once."""
        self._left()
        self._made = self._executor.run(self._arguments)

    @property
    def made(self) -> tuple[Tensor, ...]:
        """What the program has returned; on the last stage what the model returns, the logits first."""
        return self._made

    def send(self, links: Links) -> None:
        """Send on what the stages behind need."""
        again = self._executor.stepper is not None
        made = {
            spec.source: value.clone(memory_format=torch.contiguous_format) if again else value.contiguous()
            for spec, value in zip(self._executor.manifest.outputs, self._made, strict=True)
        }
        tensors = [made[item.name] if item.name in made else self._arrived[item.name] for item in self.stage.sends]
        self._leaving = links.send(tensors), tensors

    def _left(self) -> None:
        """What was sent has left: its memory may be written."""
        if self._leaving is not None:
            wait, _ = self._leaving
            wait()
            self._leaving = None

    def _room(self, item: Crossing) -> Tensor:
        return torch.zeros(item.shape, dtype=item.type, device=self._executor.device)


class PipelinedStep:
    """A step of all stages in ``parts`` of its rows, which follow one another through the stages.

    Every stage calls it with the same tokens and lengths. The last one gets the logits [B, V] of the last tokens, the
    others a tensor [B, 0]: they need not wait for the last.
    """

    def __init__(self, parts: Sequence[StagePart], links: Links) -> None:
        self._parts, self._links, self._stage, self._rows = parts, links, parts[0].stage, parts[0].rows
        orders = [order_of(stage, self._stage.stages, len(parts)) for stage in range(self._stage.stages)]
        prove_orders(orders)
        self.order = orders[self._stage.number]
        self._waits: dict[int, Wait] = {}

    def __call__(self, ids: list[list[int]], lengths: list[int]) -> Tensor:
        """Write the tokens ``ids`` [B][S] behind ``lengths`` [B] cached ones."""
        rows = self._rows
        for number, part in enumerate(self._parts):
            own = slice(number * rows, (number + 1) * rows)
            part.load(ids[own], lengths[own])
        return self.again()

    def again(self) -> Tensor:
        """The same once more, on the tokens and lengths of the last call."""
        logits: list[Tensor] = []
        for action in self.order:
            self._do(action)
            if action.kind == "compute" and self._stage.is_last:
                made = self._parts[action.part].made[0][:, -1]
                logits.append(made if len(self._parts) == 1 else made.clone())
        if not self._stage.is_last:
            return torch.empty(self._rows * len(self._parts), 0)
        return logits[0] if len(logits) == 1 else torch.cat(logits)

    def _do(self, action: Action) -> None:
        part = self._parts[action.part]
        if action.kind == "post":
            self._waits[action.part] = self._links.post(part.arriving)
        elif action.kind == "await":
            self._waits.pop(action.part)()
        elif action.kind == "compute":
            part.run()
        else:
            part.send(self._links)


def parts_of(rows: int, most: int) -> int:
    """In how many equal parts ``rows`` are computed: at most ``most``, and a divisor."""
    return max(count for count in range(1, min(rows, most) + 1) if rows % count == 0)


def pipelined_step(
    executor: Callable[[int, int], Executor],
    batch: int,
    tokens: int,
    caches: Mapping[str, Tensor],
    links: Links,
    micro_batches: int = 1,
) -> PipelinedStep:
    """The step of ``batch`` rows by ``tokens`` tokens over ``caches``; ``executor`` gives the program of a shape.

    A cache that has as many rows as the batch is cut into those of each part; what all rows share (pages) is not.
    """
    count = parts_of(batch, micro_batches)
    rows = batch // count
    program = executor(rows, tokens)
    shapes = {spec.source: spec.shape for spec in program.caller_inputs}

    def own(name: str, tensor: Tensor, part: int) -> Tensor:
        whole = name not in shapes or tuple(tensor.shape) == shapes[name]
        return tensor if whole else tensor[part * rows : (part + 1) * rows]

    parts = [
        StagePart(program, {name: own(name, tensor, part) for name, tensor in caches.items()}, rows, tokens)
        for part in range(count)
    ]
    return PipelinedStep(parts, links)
