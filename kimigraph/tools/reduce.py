"""``kimigraph reduce``: the smallest part of a program on which a pass still fails in the same way.

Delta debugging over nodes: a part (``extract``) stands as a program of its own, whose inputs are what the rest would
give it. Guesses from where values part ways come first; then chunks of nodes are dropped, down to single ones.
"""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field

from torch.fx import Node

from kimigraph.ir.config import CompileConfig
from kimigraph.ir.data_sets import data_sets
from kimigraph.ir.errors import KimigraphError
from kimigraph.ir.program import CapturedProgram
from kimigraph.tools.bisect import Bisection, FailingPass, bisect_rewrites
from kimigraph.tools.extract import extract, integer_ranges
from kimigraph.tools.failure import Failure, run_pass, sets_of
from kimigraph.tools.localize import node_values, part_ways
from kimigraph.tools.numerics import Reference

Notify = Callable[[str], None]
_RINGS = (0, 1, 2, 4, 8)
"""How many uses and arguments around the suspects the first guesses take in."""


def reduce_program(failing: FailingPass, config: CompileConfig, notify: Notify) -> Bisection:
    """The failing pass on the smallest part of its program, with the wrong rewrite found again there.

    Raises KimigraphError when the failure does not show on the program by itself (an error that only adds up).
    """
    before, failure = failing.before, failing.failure
    sets = sets_of(failure, data_sets(config.seed))
    values = node_values(before, sets[0])
    shrink = _Shrink(before, failing, config, integer_ranges(before, values))
    everything = [n.name for n in before.graph_module.graph.nodes if n.op not in ("placeholder", "output")]
    keep = next((guess for guess in shrink.guesses() if shrink.fails(guess)), None)
    if keep is None:
        if not shrink.fails(everything):
            raise KimigraphError(
                f"pass {failing.index} '{failing.item.name}' fails, but not on the nodes of its graph taken by "
                "themselves: use `kimigraph bisect`, which keeps the whole graph"
            )
        keep = everything
    notify(f"reducing from {len(keep)} nodes")
    part = shrink.program(_minimize(list(keep), shrink.fails, notify))
    smallest = FailingPass(failing.index, failing.item, part, shrink.last_failure or failure)
    return bisect_rewrites(smallest, part, config, notify)


@dataclass
class _Shrink:
    """Makes parts of the program and tells whether the pass fails on them as it does on the whole."""

    before: CapturedProgram
    failing: FailingPass
    config: CompileConfig
    ranges: dict[str, tuple[int, int]]
    last_failure: Failure | None = field(default=None, init=False)

    def program(self, keep: Collection[str]) -> CapturedProgram:
        return extract(self.before, keep, self.ranges)

    def fails(self, keep: Collection[str]) -> bool:
        """Whether the failure shows on the nodes called ``keep``, in the file written of them too."""
        if not keep:
            return False
        failure = self.failing.failure
        try:
            part = self.program(keep)
            reference = Reference(part, sets_of(failure, data_sets(self.config.seed)))
        except Exception:  # a part that does not run by itself is none; whatever an operator raises
            return False
        run = run_pass(self.failing.item, part, self.config, reference)
        if not failure.same_as(run.failure):
            return False
        if failure.kind == "numerics" and not (run.program and reference.shows(run.program)):
            return False
        self.last_failure = run.failure
        return True

    def guesses(self) -> Iterator[set[str]]:
        """Nodes around the place where values part ways, few first."""
        data = sets_of(self.failing.failure, data_sets(self.config.seed))[0]
        reference = Reference(self.before, [data])
        after = run_pass(self.failing.item, self.before, self.config, reference).program
        parting = part_ways(self.before, after, data) if after is not None else None
        if parting is None:
            return
        nodes = {node.name: node for node in self.before.graph_module.graph.nodes}
        known = {nodes[name] for name in (parting.node, *parting.suspects) if name in nodes}
        for ring in _RINGS:
            yield {node.name for node in _around(known, ring) if node.op not in ("placeholder", "output")}


def _around(nodes: Collection[Node], distance: int) -> set[Node]:
    """The nodes and those up to ``distance`` steps away; a placeholder is not walked through."""
    reached = set(nodes)
    for _ in range(distance):
        reached |= {other for n in reached if n.op != "placeholder" for other in (*n.all_input_nodes, *n.users)}
    return reached


def _minimize(keep: list[str], fails: Callable[[list[str]], bool], notify: Notify) -> list[str]:
    """Drop chunks of ``keep``, halving their size, until no single node can go."""
    size = max(len(keep) // 2, 1)
    while True:
        start, shrunk = 0, False
        while start < len(keep):
            rest = keep[:start] + keep[start + size :]
            if rest and fails(rest):
                keep, shrunk = rest, True
                notify(f"{len(keep)} nodes")
            else:
                start += size
        if size == 1 and not shrunk:
            return keep
        size = max(size // 2, 1)
