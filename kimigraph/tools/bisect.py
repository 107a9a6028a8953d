"""``kimigraph bisect``: the pass, and the rewrite inside it, that breaks numerics or crashes.

Passes run one by one, each on the program that the one before left, until one fails. Inside it, rewrites are numbered
by ``PassContext.allow``: the smallest prefix that fails ends in the wrong one. A pass that announces none is narrowed
down by values: the first node that computes something else, and what the pass changed above it.
"""

from collections.abc import Callable
from dataclasses import dataclass

from kimigraph.ir.config import CompileConfig
from kimigraph.ir.data_sets import data_sets
from kimigraph.ir.program import CapturedProgram
from kimigraph.passes import Pass, Pipeline
from kimigraph.passes.gate import NumberedRewrites
from kimigraph.passes.options import print_pass
from kimigraph.tools.failure import Failure, PassRun, run_pass, sets_of
from kimigraph.tools.localize import changed_nodes, part_ways
from kimigraph.tools.numerics import Reference

Notify = Callable[[str], None]
_SHOWN = 8


@dataclass(frozen=True)
class FailingPass:
    """The first pass of a pipeline that fails: its number from 1, the program before it and what went wrong."""

    index: int
    item: Pass
    before: CapturedProgram
    failure: Failure


@dataclass(frozen=True)
class FailingRewrite:
    """The rewrite at fault: its number among ``count`` announced ones, and its name.

    ``number`` is 0 where the pass announces none, or fails whatever is allowed; ``name`` then says where values part
    ways. ``alone`` tells whether the rewrite fails without those before it.
    """

    number: int
    count: int
    name: str
    alone: bool = True


@dataclass(frozen=True)
class Bisection:
    """What bisecting found. ``after`` is the program after the pass, ``without`` the same less the wrong rewrite.

    ``after`` is None where its values do not show the failure, ``without`` where it is not right or not to be had.
    """

    failing: FailingPass
    rewrite: FailingRewrite
    after: CapturedProgram | None
    without: CapturedProgram | None

    def summary(self) -> str:
        """One line: pass, rewrite, failure."""
        rewrite = self.rewrite
        number = f"rewrite {rewrite.number} of {rewrite.count}: " if rewrite.number else ""
        return f"pass {self.failing.index} '{print_pass(self.failing.item)}', {number}{rewrite.name}"


def find_failing_pass(
    captured: CapturedProgram, pipeline: Pipeline, config: CompileConfig, notify: Notify
) -> FailingPass | None:
    """Run the pipeline pass by pass on copies; the first pass that fails, or None."""
    reference = Reference(captured, data_sets(config.seed))
    program = captured
    for index, item in enumerate(pipeline, start=1):
        notify(f"pass {index} of {len(pipeline)}: {item.name}")
        run = run_pass(item, program, config, reference)
        if run.failure is not None or run.program is None:
            assert run.failure is not None
            return FailingPass(index, item, program, run.failure)
        program = run.program
    return None


def bisect_rewrites(
    failing: FailingPass, captured: CapturedProgram, config: CompileConfig, notify: Notify
) -> Bisection:
    """Find the rewrite of a failing pass; results are held against ``captured``."""
    sets = sets_of(failing.failure, data_sets(config.seed))
    trial = _Trial(failing, Reference(captured, sets), config)
    everything, gate = trial.run(lambda number: True)
    written = Reference(failing.before, sets) if failing.failure.kind == "numerics" else None
    after = everything.program
    if written is not None and after is not None and not written.shows(after):
        after = None
    if not gate.announced or trial.fails(lambda number: False):
        return Bisection(failing, _by_values(failing, everything.program), after, None)
    low, high = 0, len(gate.announced)
    while high - low > 1:
        middle = (low + high) // 2
        notify(f"rewrites 1 to {middle} of {len(gate.announced)}")
        limit = middle
        low, high = (low, middle) if trial.fails(lambda number, limit=limit: number <= limit) else (middle, high)
    without, _ = trial.run(lambda number: number != high)
    alone = trial.fails(lambda number: number == high)
    _, named = trial.run(lambda number: number <= high)
    rewrite = FailingRewrite(high, len(gate.announced), named.announced[high - 1], alone)
    right = without.failure is None and not (written is not None and without.program and written.shows(without.program))
    return Bisection(failing, rewrite, after, without.program if right else None)


@dataclass(frozen=True)
class _Trial:
    """Runs the failing pass with some of its rewrites."""

    failing: FailingPass
    reference: Reference
    config: CompileConfig

    def run(self, allowed: Callable[[int], bool]) -> tuple[PassRun, NumberedRewrites]:
        gate = NumberedRewrites(allowed)
        return run_pass(self.failing.item, self.failing.before, self.config, self.reference, gate), gate

    def fails(self, allowed: Callable[[int], bool]) -> bool:
        return self.failing.failure.same_as(self.run(allowed)[0].failure)


def _by_values(failing: FailingPass, after: CapturedProgram | None) -> FailingRewrite:
    """The place of the fault as far as values tell it, else all that the pass changed."""
    if after is None:
        return FailingRewrite(0, 0, "unknown: the pass announces no rewrites before it fails")
    data = failing.failure.data
    parting = part_ways(failing.before, after, data) if data is not None else None
    if parting is not None:
        return FailingRewrite(0, 0, f"values part ways at {parting.node}; changed there: {', '.join(parting.suspects)}")
    changed = changed_nodes(failing.before, after)
    more = f" and {len(changed) - _SHOWN} more" if len(changed) > _SHOWN else ""
    return FailingRewrite(0, 0, f"the pass announces no rewrites; it changed {', '.join(changed[:_SHOWN])}{more}")
