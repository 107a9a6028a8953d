"""The arena in ``program.py``: where each statement that makes a tensor is told its place.

``plan-memory`` leaves the places at the nodes (``kimigraph.ir.memory_plan``), ``describe_memory`` what each call asks
for. An operator of ATen takes its form with ``out``, a kernel's ``launch`` the places of all that it allocates.
"""

from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from kimigraph.codegen.kernel_writer import KernelSet
from kimigraph.codegen.launch_memory import Known, launch_allocations
from kimigraph.codegen.regions import kernel_kind
from kimigraph.codegen.source_text import CallText, NameOf, argument_text, call_arguments
from kimigraph.ir.errors import CompileError
from kimigraph.ir.launch_memory import allocations_of, takes_memory
from kimigraph.ir.lifetimes import new_tensors
from kimigraph.ir.memory_plan import arena_bytes, places, scratch_places
from kimigraph.ir.out_forms import COPIES, out_form

ARENA_FILE = "support/arena.py"


@dataclass(frozen=True)
class ArenaText:
    """What the arena adds to a program; without bytes nothing."""

    nbytes: int = 0

    def load(self) -> list[str]:
        """The statement of the program that makes its arena; no memory is taken before the first step."""
        return [f'arena = load("{ARENA_FILE}").Arena(DEVICE, {self.nbytes})'] if self.nbytes else []

    def begin(self) -> list[str]:
        """The first statement of the step."""
        return ["    memory = arena.memory()"] if self.nbytes else []

    def into_place(self, node: Node, call: CallText | str, name_of: NameOf) -> CallText | str:
        """``call``, which stands for ``node``, in the form that writes into the arena, where the plan says so."""
        if not self.nbytes or isinstance(call, str):
            return call
        if kernel_kind(node) is not None:
            offsets = _offsets(node)
            known = any(offset is not None for offset in offsets)
            given = f"memory=memory.at({', '.join(map(str, offsets))})"
            return CallText(call.callee, (*call.arguments, given)) if known else call
        if not places(node) or allocations_of(node) is None:
            return call
        [place] = places(node)
        target = f"memory.tensor({_form(node, place[0] if place else 0)})"
        if node.target in COPIES:
            return CallText("aten.copy_.default", (target, argument_text(node.args[0], name_of)))
        form = out_form(node)
        assert form is not None, f"{node.name} is planned and has no form that takes memory"
        [out] = [item.name for item in form._schema.arguments if item.is_out]
        return CallText(str(form), (*call_arguments(node, name_of), f"{out}={target}"))


def arena_text(graph: Graph, kernels: KernelSet) -> ArenaText:
    """The arena of a planned graph; none where nothing is planned, or where calls do not say what they allocate.

    CompileError where a kernel asks for something else than the plan was made for, or what is returned was planned.
    """
    if kernels.referenced or not takes_memory(graph) or not arena_bytes(graph):
        return ArenaText()
    for tensor in new_tensors(graph):
        if tensor.kept and any(name.meta.get("buffer") for name in tensor.names):
            raise CompileError(
                f"{tensor.name} has a place in the arena, and {tensor.kept}: the graph was changed after its "
                "memory was planned; plan it again, or call kimigraph.ir.memory_plan.clear_plan"
            )
    known: Known = {}
    for node in graph.nodes:
        planned = allocations_of(node) if kernel_kind(node) is not None else None
        if planned is not None and planned != launch_allocations(node, kernels, known):
            raise CompileError(
                f"node {node.name}: its kernel asks for other memory than was planned for it; compile with "
                "--disable-pass plan-memory and report it"
            )
    return ArenaText(arena_bytes(graph))


def _offsets(node: Node) -> list[int | None]:
    """Where the memory lies that the kernel of ``node`` asks for, in order; None: outside the arena."""
    results, scratch = places(node), iter(scratch_places(node))
    offsets: list[int | None] = []
    for item in allocations_of(node) or ():
        if item.result is None:
            place = next(scratch, None) if item.nbytes else None
        else:
            place = results[item.result] if item.result < len(results) else None
        offsets.append(None if place is None else place[0])
    return offsets


def _form(node: Node, offset: int) -> str:
    """Arguments of ``Memory.tensor``."""
    value: torch.Tensor = node.meta["val"]
    facts = [str(offset), str(tuple(value.shape)), str(value.dtype)]
    contiguous = value.stride() == torch.empty(value.shape, device="meta").stride()
    return ", ".join(facts if contiguous else [*facts, str(tuple(value.stride()))])
