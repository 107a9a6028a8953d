"""``plan-memory``: every tensor that a step makes for itself, scratch of kernels too, gets its place in one arena.

Two tensors share bytes when all use of one has ended before the other is made, by the order of streams and events
(``kimigraph.ir.stream_order``), views and writes in place included (``kimigraph.ir.lifetimes``).
"""

from dataclasses import dataclass
from typing import ClassVar

from torch.fx import Node

from kimigraph.ir.lifetimes import Lifetimes, NewTensor
from kimigraph.ir.memory_plan import ALIGNMENT, aligned, clear_plan, set_place
from kimigraph.ir.program import CapturedProgram
from kimigraph.ir.remarks import PassResult, Remark
from kimigraph.passes.base import Pass, PassContext
from kimigraph.passes.memory.offsets import place_all


@dataclass(frozen=True)
class PlanMemory(Pass):
    """Places intermediate tensors; caches, states, weights and outputs stay where they are."""

    name: ClassVar[str] = "plan-memory"
    summary: ClassVar[str] = "the tensors that a step makes for itself get their places in one arena"
    level: ClassVar[int] = 2
    pattern: ClassVar[str] = "tensors that a step makes and does not return"
    constraints: ClassVar[tuple[str, ...]] = (
        "sizes known when compiled",
        "made by kernels, or by operators of ATen with a form that writes into memory",
        "used by operators with a schema alone",
        "bytes are shared only by tensors of which one is made when all use of the other has ended",
    )
    effect: ClassVar[str] = "each has its place in one arena, which the program takes as a whole; the graph stays"

    def apply(self, program: CapturedProgram, context: PassContext) -> PassResult:
        """Write offset and size into ``meta["buffer"]`` of every node that makes a tensor or takes it from several."""
        graph = program.graph_module.graph
        clear_plan(graph)
        if context.describe_memory is not None:
            context.describe_memory(graph)
        lifetimes = Lifetimes(graph)
        tensors = lifetimes.tensors
        sizes = [aligned(tensor.nbytes) for tensor in tensors]
        bound = lifetimes.lower_bound(sizes)
        offsets = place_all(sizes, lifetimes.conflicts, bound)
        for tensor, offset in zip(tensors, offsets, strict=True):
            set_place(tensor, offset)
        arena = max((offset + size for offset, size in zip(offsets, sizes, strict=True)), default=0)
        statistics = {"tensors": len(tensors), "bytes": sum(sizes), "arena bytes": arena, "lower bound": bound}
        remarks = [_summary(statistics, lifetimes)] if tensors else []
        remarks += [_kept(tensor) for tensor in lifetimes.kept]
        return PassResult(bool(tensors), tuple(remarks), statistics)


def _summary(statistics: dict[str, int], lifetimes: Lifetimes) -> Remark:
    arena, bound = statistics["arena bytes"], statistics["lower bound"]
    streams = "one stream" if lifetimes.order.streams == 1 else f"{lifetimes.order.streams} streams"
    message = (
        f"{statistics['tensors']} tensors of {statistics['bytes']:,} bytes fit an arena of {arena:,}: "
        f"{arena / bound:.3f} times what is in use at once ({bound:,}); {streams}, multiples of {ALIGNMENT} bytes"
    )
    return Remark("note", PlanMemory.name, message)


def _kept(tensor: NewTensor) -> Remark:
    node: Node = tensor.maker
    return Remark("note", PlanMemory.name, f"{tensor.name} lies outside the arena: {tensor.kept}", node.name)
