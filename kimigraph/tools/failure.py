"""What is wrong with a pass on a program: the test that bisecting and reducing repeat."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from kimigraph.ir.config import CompileConfig
from kimigraph.ir.data_sets import DataSet
from kimigraph.ir.errors import CompileError
from kimigraph.ir.program import CapturedProgram
from kimigraph.ir.provenance import source_line
from kimigraph.ir.verifier import verify
from kimigraph.passes import Pass, PassContext, Pipeline, run_pipeline
from kimigraph.passes.gate import RewriteGate
from kimigraph.passes.manager import node_at_fault
from kimigraph.tools.numerics import Reference


@dataclass(frozen=True)
class Failure:
    """A pass that fails: it (or the graph that it left) raises, leaves an invalid graph, or changes the result."""

    kind: Literal["crash", "invalid", "numerics"]
    message: str
    error: str = ""
    """Type of what was raised (``crash``)."""
    data: DataSet | None = None
    """The data set on which the result differs most (``numerics``)."""

    def same_as(self, other: "Failure | None") -> bool:
        """Whether it is the same failure as far as one can tell: not another one met on the way."""
        return other is not None and (self.kind, self.error) == (other.kind, other.error)


@dataclass(frozen=True)
class PassRun:
    """One pass on a copy of a program: the program after it (None when it raised) and what is wrong with it."""

    program: CapturedProgram | None
    failure: Failure | None


def run_pass(
    item: Pass,
    program: CapturedProgram,
    config: CompileConfig,
    reference: Reference,
    gate: RewriteGate | None = None,
) -> PassRun:
    """Run ``item`` on a copy of ``program`` and hold the result against ``reference``.

    Numbers come before the verifier: what an invalid graph computes says more than the rule that it breaks.
    """
    after = program.copy()
    context = PassContext(config, gate or RewriteGate())
    try:
        run_pipeline(after, Pipeline((item,)), context, verify=False)
    except Exception as error:
        return PassRun(None, _crash(error))
    return PassRun(after, failure_of(after, reference))


def failure_of(program: CapturedProgram, reference: Reference) -> Failure | None:
    """What is wrong with a program, held against ``reference``."""
    try:
        comparison = reference.compare(program)
    except Exception as error:
        return _crash(error)
    if not comparison.passed:
        return Failure("numerics", comparison.fault, data=comparison.data)
    try:
        verify(program)
    except CompileError as error:
        return Failure("invalid", str(error))
    return None


def _crash(error: Exception) -> Failure:
    cause = error.__cause__ if isinstance(error, CompileError) and error.__cause__ else error
    node, kind = node_at_fault(cause), type(cause).__name__
    place = (
        f" at node '{node.name}' ({node.target}, {source_line(node) or 'no source line'})" if node is not None else ""
    )
    return Failure("crash", f"{kind}{place}: {cause}", kind)


def sets_of(failure: Failure, sets: Sequence[DataSet]) -> Sequence[DataSet]:
    """The data sets that show a failure: one is enough."""
    return [failure.data] if failure.data is not None else list(sets)[:1]
