"""``verify-schedule``: a proof that the program, as it is scheduled, has no race; it is the last pass of a compilation.

Nothing of ``assign-streams`` or ``plan-memory`` is trusted but what they left at the nodes: the order that streams and
waits give is worked out anew (vector clocks), and every dependence, every join and every byte that is used twice is
held against it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from torch.fx import Graph, Node

from kimigraph.ir.collectives import collectives
from kimigraph.ir.dependences import Dependence, work_dependences
from kimigraph.ir.errors import CompileError
from kimigraph.ir.program import CapturedProgram
from kimigraph.ir.remarks import PassResult, Remark
from kimigraph.ir.schedule import HappensBefore, buffer_of, waits_of
from kimigraph.passes.base import Pass, PassContext
from kimigraph.passes.scheduling.arena import memory_violations
from kimigraph.passes.scheduling.collectives import communication_violations
from kimigraph.passes.scheduling.races import Violation, unjoined_streams, unkept_dependences

SHOWN = 3


@dataclass(frozen=True)
class VerifySchedule(Pass):
    """Raises CompileError, naming two nodes and the missing edge, when the schedule of the program is wrong."""

    name: ClassVar[str] = "verify-schedule"
    summary: ClassVar[str] = "a proof that the scheduled program has no race"
    analysis: ClassVar[bool] = True
    pattern: ClassVar[str] = "the whole program, with its streams, waits and buffers"
    constraints: ClassVar[tuple[str, ...]] = (
        "reads and writes of one storage, through views and in-place results, are ordered across streams",
        "collectives, random numbers and assertions have one order, collectives that in which they are numbered",
        "what a collective gives is used behind its wait, and what it reads is not written before",
        "every side stream is joined before outputs and updated inputs go back to the caller",
        "bytes of the arena are written again only when every user of what they hold is done; what is returned stays",
    )
    effect: ClassVar[str] = "nothing changes; a violation is an error that names two nodes and the missing edge"

    def apply(self, program: CapturedProgram, context: PassContext) -> PassResult:
        """Check everything; the remark says what was proven."""
        graph = program.graph_module.graph
        dependences, order = work_dependences(graph), HappensBefore(graph)
        found = list(_violations(graph, dependences, order))
        if found:
            raise ScheduleError(found)
        counts = {
            "nodes": len(dependences),
            "dependences": sum(map(len, dependences.values())),
            "streams": order.count,
            "events": len({name for node in graph.nodes for name in waits_of(node)}),
            "buffers": sum(buffer_of(node) is not None for node in graph.nodes),
        }
        if communicating := len(collectives(graph)):
            counts["collectives"] = communicating
        told = ", ".join(f"{count} {name}" for name, count in counts.items())
        return PassResult(False, (Remark("note", self.name, f"no race, every stream joined: {told}"),), counts)


class ScheduleError(CompileError):
    """A schedule that is not safe; ``violations`` has every fault, ``node`` the node of the first."""

    def __init__(self, violations: list[Violation]) -> None:
        self.violations = violations
        self.node = violations[0].node
        more = len(violations) - SHOWN
        told = [violation.describe() for violation in violations[:SHOWN]]
        told += [f"{more} more"] if more > 0 else []
        super().__init__("the schedule is not safe: " + "; ".join(told))


def _violations(graph: Graph, dependences: dict[Node, list[Dependence]], order: HappensBefore) -> Iterator[Violation]:
    yield from unkept_dependences(dependences, order)
    yield from unjoined_streams(graph, order)
    yield from memory_violations(graph, order)
    yield from communication_violations(graph, order)
