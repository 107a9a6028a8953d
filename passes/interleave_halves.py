"""``interleave-halves``: a step captured for half of a batch becomes the step of the whole, as two independent halves.

Inside one batch the layers are a chain. Two halves of it need nothing of one another, so the KDA layers of one can run
beside the sparse attention of the other: ``assign-streams`` says where. Each half reads every weight.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch.fx import Node

from kimigraph.ir.fake import fake_mode
from kimigraph.ir.halves import WAITING, halves_of, mark_doubled
from kimigraph.ir.program import CapturedProgram, OutputSpec
from kimigraph.ir.purity import is_pure, mutated_arguments, storage_root
from kimigraph.ir.remarks import PassResult, Remark
from kimigraph.passes.algebra.rewrite import call
from kimigraph.passes.base import Pass, PassContext

ATEN = torch.ops.aten


@dataclass(frozen=True)
class InterleaveHalves(Pass):
    """Doubles a program that was captured for half of a batch (``--half-batches``); other programs stay as they are."""

    name: ClassVar[str] = "interleave-halves"
    summary: ClassVar[str] = "a step of half the batch becomes two independent halves of the step"
    level: ClassVar[int] = 2
    changes_formats: ClassVar[bool] = True
    pattern: ClassVar[str] = "a step captured for half of the batch"
    constraints: ClassVar[tuple[str, ...]] = (
        "`--half-batches on`, or `auto` where the planned step of two halves is at least 5 % shorter",
        "decode of an even batch, on several streams, with caches as the model has them",
    )
    effect: ClassVar[str] = (
        "inputs and caches of the whole batch, of which each half takes its rows; all that depends on them twice, the "
        "results concatenated; `assign-streams` places both halves as one part"
    )

    def apply(self, program: CapturedProgram, context: PassContext) -> PassResult:
        """Widen the inputs, copy the step for the second half, and join the results."""
        if halves_of(program) != WAITING:
            return PassResult(False)
        half = int(program.info["batch"])
        copied = _Work(program, half).run()
        mark_doubled(program)
        program.graph_module.graph.lint()
        program.graph_module.recompile()
        told = f"two half-batches of {half} sequences: {copied} nodes twice"
        return PassResult(True, (Remark("passed", self.name, told),), {"nodes": copied})


class _Work:
    """One run over one program."""

    def __init__(self, program: CapturedProgram, half: int) -> None:
        self._program, self._graph = program, program.graph_module.graph
        self._half = half
        self._nodes: list[Node] = list(self._graph.nodes)
        self._written = {storage_root(value) for node in self._nodes for value in mutated_arguments(node)}

    def run(self) -> int:
        """Rewrite everything; returns how many nodes there are twice."""
        *body, output = [node for node in self._nodes if node.op != "placeholder"]
        own = list(self._of_the_batch(body))
        returned: Any = output.args[0]
        results: list[Node] = list(returned)
        first, second = dict[Node, Node](), dict[Node, Node]()
        for placeholder in [node for node in self._nodes if node.op == "placeholder"]:
            self._widen(placeholder, body[0], first, second)
        for node in own:
            for value, half in first.items():
                node.replace_input_with(value, half)
        second |= {half: second[value] for value, half in first.items()}
        with self._graph.inserting_before(output):
            for node in own:
                second[node] = self._graph.node_copy(node, lambda value: second.get(value, value))
                second[node].meta = dict(node.meta)
        for number, nodes in enumerate((own, [second[node] for node in own])):
            for node in nodes:
                node.meta.setdefault("branch", f"half {number}")
        joined = tuple(self._joined(node, second[node], output) for node in results)
        output.args = (joined,)
        self._program.outputs = tuple(
            OutputSpec(node.name, spec.source) for node, spec in zip(joined, self._program.outputs, strict=True)
        )
        return len(own)

    def _of_the_batch(self, body: list[Node]) -> Iterator[Node]:
        """What depends on the caller's inputs, or is written: all but what is made of weights alone."""
        bound = {spec.name for spec in self._program.inputs if spec.bound}
        shared: set[Node] = {node for node in self._nodes if node.op == "placeholder" and node.name in bound}
        for node in body:
            apart = all(value in shared for value in node.all_input_nodes) and is_pure(node)
            if apart and storage_root(node) not in self._written:
                shared.add(node)
            else:
                yield node

    def _widen(self, placeholder: Node, before: Node, first: dict[Node, Node], second: dict[Node, Node]) -> None:
        """Give an input of the batch its whole extent, and each half its rows."""
        spec = next(spec for spec in self._program.inputs if spec.name == placeholder.name)
        if spec.bound:
            return
        half, batch = self._half, 2 * self._half
        whole = replace(spec, shape=(batch, *spec.shape[1:]))
        value = placeholder.meta["val"]
        with fake_mode(self._graph):
            placeholder.meta["val"] = torch.empty_strided(
                whole.shape, whole.stride, dtype=value.dtype, device=value.device
            )
        self._program.inputs = tuple(whole if one is spec else one for one in self._program.inputs)
        first[placeholder] = self._rows(placeholder, 0, half, before)
        second[placeholder] = self._rows(placeholder, half, batch, before)

    def _rows(self, placeholder: Node, begin: int, end: int, before: Node) -> Node:
        return call(self._graph, ATEN.slice.Tensor, (placeholder, 0, begin, end), like=placeholder, before=before)

    def _joined(self, first: Node, second: Node, output: Node) -> Node:
        return call(self._graph, ATEN.cat.default, ([first, second],), like=first, before=output)
