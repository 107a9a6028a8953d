"""``overlap-communication``: work that does not wait for a collective runs while ranks communicate, where there is any.

A collective runs on a stream of the library's own. It begins as soon as its input is there, and is waited for at the
first use of what it gives; what stands behind that and does not need it goes in front. Two halves of a batch take
turns. On demand a sum of a long product is made in parts, each summed while the next is multiplied, where the cost
model says that this is quicker. Then the collectives are numbered, and ``verify-schedule`` holds the program to that
order.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch.fx import Graph, Node

from kimigraph.ir.collectives import Pair, collectives, number_collectives, pairs
from kimigraph.ir.config import CompileConfig
from kimigraph.ir.dependences import Dependence, node_dependences
from kimigraph.ir.halves import halves_of
from kimigraph.ir.program import CapturedProgram
from kimigraph.ir.provenance import module_path, source_line
from kimigraph.ir.remarks import PassResult, Remark
from kimigraph.passes.base import Pass, PassContext
from kimigraph.passes.scheduling.alternate import alternate_halves
from kimigraph.passes.scheduling.communication import (
    LATENCY_US,
    RATE,
    Links,
    Split,
    best_split,
    hoist_start,
    independent_work,
    sink_wait,
    split_sum,
    work_between,
)

SHOWN = 4


@dataclass(frozen=True)
class OverlapCommunication(Pass):
    """Lets work run beside collectives.

    Options: ``split``, whether sums are made in parts: off, since a prompt of 8,192 tokens then took 20.7 ms for 17.6
    on two H200s (bench/results/overlap.json); ``latency-us`` and ``rate``, what a collective of the library takes at
    least and gigabytes a second of the links between ranks, as measured on two H200s; ``least-gain-us``, what a sum in
    parts must save, and work that is moved must take.
    """

    name: ClassVar[str] = "overlap-communication"
    summary: ClassVar[str] = "work that does not wait for a collective runs while ranks communicate"
    level: ClassVar[int] = 2
    pattern: ClassVar[str] = "a collective and its wait; a sum over ranks of a product"
    constraints: ClassVar[tuple[str, ...]] = (
        "several ranks share a program (`--tp`, `--sp`)",
        "the work depends neither on the collective nor on anything else behind it, by data or by writes",
        "with `split`: a sum in parts is at least 5 us quicker by the cost model, the parts' joining included",
        "collectives begin in the order in which they stood",
    )
    effect: ClassVar[str] = (
        "waits at the first use, independent work in front of them; halves of a batch (`--half-batches on`) in turn; "
        "with `split` products and sums over ranks in 2 or 4 parts"
    )

    split: bool = False
    latency_us: float = LATENCY_US
    rate: float = RATE
    least_gain_us: float = 5.0

    def apply(self, program: CapturedProgram, context: PassContext) -> PassResult:
        """Split sums, then move starts, waits and independent work."""
        graph, links = program.graph_module.graph, Links(self.latency_us * 1e-6, self.rate * 1e9)
        if not collectives(graph):
            return PassResult(False)
        before = list(graph.nodes)
        alternating = halves_of(program) is not None and alternate_halves(graph)
        splits = self._split(graph, links, context) if self.split and not alternating else []
        count = number_collectives(graph)
        exposed: list[Node] = []
        hidden = shown = 0.0
        remarks = [self._told_split(split) for split in splits]
        dependences, roots = node_dependences(graph.nodes), dict[Node, Node]()
        for pair in pairs(graph):
            taken, moved = self._move(pair, dependences, roots, links, context)
            meanwhile = work_between(pair, context.device)
            hidden, shown = hidden + min(taken, meanwhile), shown + max(taken - meanwhile, 0.0)
            if meanwhile:
                remarks.append(self._told_hidden(pair, taken, meanwhile, moved))
            else:
                exposed.append(pair.start)
        if alternating:
            remarks.append(Remark("passed", self.name, "two halves of the batch take turns where they wait"))
        if exposed:
            remarks.append(self._told_exposed(exposed))
        modified = list(graph.nodes) != before
        if modified:
            graph.lint()
            program.graph_module.recompile()
        counts = {"collectives": count, "split": len(splits), "without_work": len(exposed)}
        counts |= {"hidden_ns": round(hidden * 1e9), "shown_ns": round(shown * 1e9)}
        return PassResult(modified, tuple(remarks), counts)

    def _split(self, graph: Graph, links: Links, context: PassContext) -> list[Split]:
        found: list[Split] = []
        for pair in pairs(graph):
            split = best_split(pair, links, ways_of(pair.start, context.config), context.device)
            gains = split is not None and (split.whole - split.split) * 1e6 >= self.least_gain_us
            if split is not None and gains and context.allow(f"{pair.start.name} in {split.parts} parts"):
                split_sum(split)
                found.append(split)
        return found

    def _move(
        self,
        pair: Pair,
        dependences: dict[Node, list[Dependence]],
        roots: dict[Node, Node],
        links: Links,
        context: PassContext,
    ) -> tuple[float, Sequence[Node]]:
        """Seconds of a collective, and what was moved in front of its wait."""
        hoist_start(pair, dependences[pair.start])
        sink_wait(pair, roots)
        taken = links.seconds(pair.start, ways_of(pair.start, context.config))
        lacking = taken - work_between(pair, context.device)
        if lacking <= 0:
            return taken, ()
        moved, seconds = independent_work(pair, dependences, context.device, lacking)
        if seconds * 1e6 < self.least_gain_us or not context.allow(f"work beside {pair.start.name}"):
            return taken, ()
        for node in moved:
            pair.wait.prepend(node)
        return taken, moved

    def _told_split(self, split: Split) -> Remark:
        message = (
            f"{split.product.name} is multiplied and summed in {split.parts} parts: {split.whole * 1e6:.1f} us as one, "
            f"{split.split * 1e6:.1f} us in parts, joining included"
        )
        return Remark("passed", self.name, message, split.product.name, nodes=(split.product.name,), score=1)

    def _told_hidden(self, pair: Pair, taken: float, meanwhile: float, moved: Sequence[Node]) -> Remark:
        names = ", ".join(node.name for node in moved[:SHOWN]) + (", ..." if len(moved) > SHOWN else "")
        message = f"{pair.start.name} ({taken * 1e6:.1f} us) runs beside {meanwhile * 1e6:.1f} us of other work"
        message += f"; {names} moved in front of its wait" if moved else ""
        return Remark(
            "passed",
            self.name,
            message,
            pair.start.name,
            source_line(pair.start),
            (pair.start.name,),
            score=1,
            module=module_path(pair.start),
        )

    def _told_exposed(self, exposed: Sequence[Node]) -> Remark:
        names = ", ".join(node.name for node in exposed[:SHOWN]) + (", ..." if len(exposed) > SHOWN else "")
        message = (
            f"{len(exposed)} collectives stay as they are ({names}): what follows needs them, and nothing else is "
            "there to be done meanwhile"
        )
        return Remark("missed", self.name, message, exposed[0].name, source_line(exposed[0]))


def ways_of(node: Node, config: CompileConfig) -> int:
    """The ranks of a collective's group, by its name."""
    name = str(node.args[-1]).rpartition(".")[2]
    return config.mesh.sizes.get(name, config.mesh.ways)
