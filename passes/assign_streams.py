"""``assign-streams``: branches that do not wait for one another run on several streams, where that pays.

A program is cut where it is as narrow as one node; each part between two such places is list-scheduled by itself under
the cost model, and forks when that saves time. Everything is joined where the part ends.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import ClassVar

from torch.fx import Graph, Node

from kimigraph.ir.collectives import collectives
from kimigraph.ir.dependences import Dependence, starts_work, work_dependences
from kimigraph.ir.halves import halves_of
from kimigraph.ir.program import CapturedProgram
from kimigraph.ir.provenance import module_path, source_line
from kimigraph.ir.remarks import PassResult, Remark
from kimigraph.ir.schedule import clear_streams, waits_of
from kimigraph.passes.algebra.nodes import shape
from kimigraph.passes.algebra.products import products
from kimigraph.passes.base import Pass, PassContext
from kimigraph.passes.scheduling.branches import (
    Costs,
    Duration,
    Placement,
    best_placement,
    bound_to_caller,
    costs_of,
    duration_of,
)
from kimigraph.passes.scheduling.halves import bound_of
from kimigraph.passes.scheduling.recording import record_by_time, record_main_first, set_waits
from kimigraph.passes.scheduling.segments import Segment, segments

PLANNED = "planned_ns"
"""Statistic: nanoseconds of the program as placed, by the model that decides on forks."""
MOST_TOKENS = 8
"""A first run (docs/schedule.md): forks gained at 1 and 8 tokens and lost at 64, where a library has large kernels."""


@dataclass(frozen=True)
class AssignStreams(Pass):
    """Puts nodes on streams and says what they wait for.

    Options: ``streams``, the largest number of streams (0: that of ``--streams``); ``force``, fork wherever it is legal
    (so does ``--force-streams``); ``tokens``, the most tokens of a step that is forked, as larger kernels fill the
    device; ``least-gain-us``, what a fork must save; ``whole``, place the program as one part, from begin to end, as it
    suits a piece of a program whose branches begin at its inputs.
    """

    name: ClassVar[str] = "assign-streams"
    summary: ClassVar[str] = "branches that do not wait for one another run on several streams"
    level: ClassVar[int] = 2
    pattern: ClassVar[str] = "nodes that do not wait for one another, between two that all others are ordered with"
    constraints: ClassVar[tuple[str, ...]] = (
        "no dependence, by data or by the order of reads and writes of one storage",
        "random numbers, assertions, collectives and kernels that keep counters stay on the caller's stream",
        "at most 8 tokens in a step, a device that runs several kernels at once",
        "no two kernels that fill the device side by side",
        "saves at least half a microsecond by the cost model, events included",
    )
    effect: ClassVar[str] = "a stream for each node, the fewest waits between them, the main branch recorded first"

    streams: int = 0
    force: bool = False
    tokens: int = MOST_TOKENS
    least_gain_us: float = 0.5
    whole: bool = False

    def apply(self, program: CapturedProgram, context: PassContext) -> PassResult:
        """Cut, place each part, then record the main branch first and set the waits."""
        graph = program.graph_module.graph
        clear_streams(graph)
        force = self.force or context.config.force_streams
        count = self.streams or context.config.streams
        hindrance = self._hindrance(program, context, count, force)
        halves = self._halves(program, context) if count > 1 and context.device.units > 1 else []
        if hindrance:
            return PassResult(False, (*halves, self._note(f"one stream: {hindrance}")))
        dependences = work_dependences(graph)
        serial = sum(duration_of(node, context.device).seconds for node in dependences)
        whole = self.whole or _side_by_side(program)
        forks, remarks = self._forks(dependences, context, count, force, whole)
        if not forks:
            return PassResult(
                False, (*remarks, *halves, self._note(_why_serial(remarks))), {PLANNED: round(serial * 1e9)}
            )
        _apply(graph, forks, dependences, by_time=_side_by_side(program))
        program.graph_module.recompile()
        events = {name for node in graph.nodes for name in waits_of(node)}
        aside = sum(len(placement.aside) for _, placement in forks)
        gained = sum(placement.serial - placement.seconds for _, placement in forks)
        statistics = {"forks": len(forks), "aside": aside, "events": len(events)}
        if not force:
            statistics[PLANNED] = round((serial - gained) * 1e9)
        return PassResult(True, (*remarks, *halves), statistics)

    def forks(self, program: CapturedProgram, context: PassContext) -> bool:
        """Whether nodes of this program may leave the caller's stream where that pays."""
        force, count = self.force or context.config.force_streams, self.streams or context.config.streams
        return not self._hindrance(program, context, count, force)

    def _hindrance(self, program: CapturedProgram, context: PassContext, count: int, force: bool) -> str:
        """Why no node of this program may leave the caller's stream; empty when some may."""
        if count < 2:
            return "no more were asked for (--streams)"
        if force:
            return ""
        if context.device.units < 2:
            return f"{context.device.name} runs one kernel at a time"
        tokens = tokens_of(program)
        if tokens > self.tokens and not _side_by_side(program):
            return f"kernels for {tokens} tokens fill the device; forks pay up to {self.tokens} (option tokens)"
        return ""

    def _forks(
        self, dependences: dict[Node, list[Dependence]], context: PassContext, count: int, force: bool, whole: bool
    ) -> tuple[list[tuple[Segment, Placement]], list[Remark]]:
        forks: list[tuple[Segment, Placement]] = []
        remarks: list[Remark] = []
        for segment in [Segment(tuple(dependences), None)] if whole and dependences else segments(dependences):
            costs = _forced_costs(segment) if force else costs_of(segment.nodes, context.device)
            placement = best_placement(segment.nodes, dependences, costs, count)
            gain = (placement.serial - placement.seconds) * 1e6
            if not placement.aside:
                continue
            if not force and gain < self.least_gain_us:
                remarks.append(self._missed(placement))
            elif context.allow(f"a fork at {segment.nodes[0].name} ({source_line(segment.nodes[0])})"):
                forks.append((segment, placement))
                remarks.append(self._passed(segment, placement, force))
        return forks, remarks

    def _halves(self, program: CapturedProgram, context: PassContext) -> list[Remark]:
        """What two interleaved half-batches would cost at least: they overlap layers, which one batch cannot."""
        if int(program.info.get("batch", 1)) < 2 or halves_of(program) is not None:
            return []
        return [self._note(bound_of(program, context.device).describe(context.device))]

    def _passed(self, segment: Segment, placement: Placement, force: bool) -> Remark:
        first, aside = segment.nodes[0], placement.aside
        price = "because it is legal" if force else _prices(placement)
        message = f"{_listed(aside)} run beside {_listed(_main(placement))}: {price}"
        nodes = tuple(node.name for node in segment.nodes)
        return Remark(
            "passed", self.name, message, aside[0].name, source_line(first), nodes, score=1, module=module_path(first)
        )

    def _missed(self, placement: Placement) -> Remark:
        aside = placement.aside
        message = f"{_listed(aside)} could run beside {_listed(_main(placement))}: {_prices(placement)}"
        message += f", less than {self.least_gain_us} us gained"
        remedy = f"{self.name}{{least-gain-us=0}} forks for any gain, --force-streams for none"
        return Remark(
            "missed",
            self.name,
            message,
            aside[0].name,
            source_line(aside[0]),
            remedy=remedy,
            module=module_path(aside[0]),
        )

    def _note(self, message: str) -> Remark:
        return Remark("note", self.name, message)


def _side_by_side(program: CapturedProgram) -> bool:
    """Whether two halves of a batch are to run beside one another; those that communicate take turns instead."""
    return halves_of(program) is not None and not collectives(program.graph_module.graph)


def tokens_of(program: CapturedProgram) -> int:
    """Tokens of a step: those that the capture states, else the rows that most of the products with a weight have."""
    if "batch" in program.info:
        return int(program.info["batch"]) * int(program.info.get("tokens", 1))
    specs = {spec.name: spec for spec in program.inputs}
    rows = Counter(
        prod(shape(product.left)[:-1]) for product in products(list(program.graph_module.graph.nodes), specs)
    )
    return max(rows, key=lambda count: (rows[count], count), default=1)


def _forced_costs(segment: Segment) -> Costs:
    """Costs under which every fork pays."""
    durations = {node: Duration(1.0, 0.0) for node in segment.nodes}
    return Costs(durations, 0.0, bound_to_caller(segment.nodes))


def _apply(
    graph: Graph,
    forks: Sequence[tuple[Segment, Placement]],
    dependences: dict[Node, list[Dependence]],
    *,
    by_time: bool,
) -> None:
    """Give nodes their streams, an order and waits: the main branch first, or two halves as their nodes begin."""
    output = next(iter(reversed(graph.nodes)))
    joins: dict[Node, list[Node]] = {}
    for segment, placement in forks:
        for node in placement.aside:
            node.meta["stream"] = placement.streams[node]
        _follow(segment, segment.closer or output)
        if by_time:
            record_by_time(segment.nodes[0], segment.closer or output, placement.begins)
        else:
            record_main_first(segment.nodes[0], segment.closer or output)
        joins[segment.closer or output] = placement.aside
    set_waits(graph, dependences, joins)


def _follow(segment: Segment, closer: Node) -> None:
    """Views and items stand where what they are taken from does: nothing changes streams for them."""
    node = segment.nodes[0]
    while node is not closer:
        if not starts_work(node):
            streams = [argument.meta["stream"] for argument in node.all_input_nodes if "stream" in argument.meta]
            if streams:
                node.meta["stream"] = streams[0]
        node = node.next


def _main(placement: Placement) -> list[Node]:
    return [node for node, stream in placement.streams.items() if not stream]


def _listed(nodes: Sequence[Node]) -> str:
    names = [node.name for node in nodes]
    return ", ".join(names) if len(names) <= 4 else f"{', '.join(names[:3])} and {len(names) - 3} more"


def _prices(placement: Placement) -> str:
    return f"{placement.serial * 1e6:.2f} us on one stream, {placement.seconds * 1e6:.2f} us forked, events included"


def _why_serial(remarks: Sequence[Remark]) -> str:
    if not remarks:
        return "one stream: the program is a chain, no two nodes of it can run side by side with a gain"
    return f"one stream: none of {len(remarks)} places with independent nodes gains enough from a fork"
