"""Runs a pipeline over a program and holds each pass to its contract."""

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

from torch.fx import Node

from kimigraph.ir.errors import CompileError
from kimigraph.ir.program import CapturedProgram
from kimigraph.ir.provenance import source_line
from kimigraph.ir.remarks import PassResult
from kimigraph.passes.base import Pass, PassContext
from kimigraph.passes.fingerprint import Fingerprint, GraphState, interface_fingerprint
from kimigraph.passes.instruments.base import Instrument
from kimigraph.passes.instruments.verify import VerifyPasses
from kimigraph.passes.options import print_pass
from kimigraph.passes.pipeline import Pipeline

State = tuple[GraphState, Fingerprint]
"""A program's graph and its interface, before and after a pass."""


@dataclass(frozen=True)
class PassRecord:
    """One pass that ran: its name, its text with options, what it returned, its time and the node counts around it."""

    name: str
    text: str
    fusion: bool
    result: PassResult
    seconds: float
    nodes_before: int
    nodes_after: int


def run_pipeline(
    program: CapturedProgram,
    pipeline: Pipeline,
    context: PassContext,
    instruments: Sequence[Instrument] = (),
    *,
    verify: bool = True,
) -> list[PassRecord]:
    """Run the passes over ``program`` in place and return one record for each.

    Args:
        instruments: called in this order at each event, after the verifier (``verify``), which is one of them.

    Raises:
        CompileError: a pass raised, broke its contract or left a graph that does not verify. It names pass, node and
            remedy; the original error is its cause. An analysis that finds a fault raises its own.
        KimigraphError: whatever an instrument raises on purpose.
    """
    watchers = [VerifyPasses(), *instruments] if verify else list(instruments)
    for watcher in watchers:
        watcher.before_pipeline(program, pipeline)
    records: list[PassRecord] = []
    state = _state(program)
    for index, item in enumerate(pipeline, start=1):
        record, state = _run_pass(index, item, program, context, watchers, state)
        records.append(record)
    for watcher in watchers:
        watcher.after_pipeline(program)
    return records


def _run_pass(
    index: int,
    item: Pass,
    program: CapturedProgram,
    context: PassContext,
    watchers: Sequence[Instrument],
    before: State,
) -> tuple[PassRecord, State]:
    """The record of a pass, and the state in which it left the program."""
    nodes_before = len(program.graph_module.graph.nodes)
    start = perf_counter()
    try:
        result = item.apply(program, context)
    except Exception as error:
        _tell_failure(index, item, program, error, watchers)
        if item.analysis and isinstance(error, CompileError):
            raise
        raise _failure(index, item, error) from error
    seconds = perf_counter() - start
    try:
        after = _state(program)
        _check_contract(index, item, result, before, after)
        if result.modified:
            program.graph_module.recompile()
        for watcher in watchers:
            watcher.after_pass(index, item, program, result, seconds)
    except Exception as error:
        _tell_failure(index, item, program, error, watchers)
        raise
    nodes_after = len(program.graph_module.graph.nodes)
    return PassRecord(item.name, print_pass(item), item.fusion, result, seconds, nodes_before, nodes_after), after


def _state(program: CapturedProgram) -> State:
    interface = (interface_fingerprint(program.graph_module), program.inputs, program.outputs)
    return GraphState(program.graph_module), interface


def _check_contract(
    index: int,
    item: Pass,
    result: object,
    before: State,
    after: State,
) -> None:
    fault = ""
    if not isinstance(result, PassResult):
        fault = f"returned {type(result).__name__} instead of a PassResult"
    elif before[1] != after[1] and not (item.changes_formats and result.modified):
        fault = "changed the inputs or outputs of the program"
    elif not result.modified and before[0] != after[0]:
        fault = "changed the graph and returned modified=False"
    if fault:
        raise CompileError(
            f"pass {index} '{item.name}' {fault}. "
            f"This is a fault of the pass; --disable-pass {item.name} compiles without it."
        )


def _tell_failure(
    index: int, item: Pass, program: CapturedProgram, error: Exception, watchers: Sequence[Instrument]
) -> None:
    for watcher in watchers:
        watcher.pass_failed(index, item, program, error)


def _failure(index: int, item: Pass, error: Exception) -> CompileError:
    node = node_at_fault(error)
    place = (
        f" at node '{node.name}' ({node.target}, {source_line(node) or 'no source line'})" if node is not None else ""
    )
    return CompileError(
        f"pass {index} '{item.name}' failed{place}: {type(error).__name__}: {error}. "
        f"--disable-pass {item.name} compiles without it."
    )


def node_at_fault(error: BaseException) -> Node | None:
    """The graph node that a pass was at when it raised: the error's own ``node``, else the innermost local."""
    node = getattr(error, "node", None)
    if isinstance(node, Node):
        return node
    found: Node | None = None
    trace = error.__traceback__
    while trace is not None:
        variables = trace.tb_frame.f_locals
        nodes = [value for name, value in variables.items() if isinstance(value, Node) and name != "self"]
        preferred = variables.get("node")
        found = preferred if isinstance(preferred, Node) else nodes[-1] if nodes else found
        trace = trace.tb_next
    return found
