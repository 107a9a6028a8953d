"""Running a pipeline: records, instruments, the contract that passes are held to, required fusions."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

import pytest
import torch

from kimigraph.ir.config import CompileConfig
from kimigraph.ir.errors import CompileError, NumericsError, RequiredFusionError
from kimigraph.ir.fake import infer
from kimigraph.ir.program import CapturedProgram
from kimigraph.ir.remarks import PassResult, Remark
from kimigraph.passes import (
    Instrument,
    Pass,
    PassContext,
    PassRecord,
    Pipeline,
    TimePasses,
    check_required_fusions,
    fusion_summary,
    run_pipeline,
)
from kimigraph.passes.fingerprint import graph_fingerprint

ATEN = torch.ops.aten
Trace = Callable[..., CapturedProgram]


@dataclass(frozen=True)
class Silent(Pass):
    """Does nothing."""

    name: ClassVar[str] = "silent"
    summary: ClassVar[str] = "does nothing"

    def apply(self, program: CapturedProgram, context: PassContext) -> PassResult:
        return PassResult(False)


@dataclass(frozen=True)
class Negate(Pass):
    """Negates every sine; ``honest=false`` says that it did not."""

    name: ClassVar[str] = "negate"
    summary: ClassVar[str] = "negates sines"

    honest: bool = True
    typed: bool = True

    def apply(self, program: CapturedProgram, context: PassContext) -> PassResult:
        graph = program.graph_module.graph
        for node in [node for node in graph.nodes if node.target is ATEN.sin.default]:
            with graph.inserting_after(node):
                new = graph.call_function(ATEN.neg.default, (node,))
            if self.typed:
                infer(new)
            node.replace_all_uses_with(new, lambda user, new=new: user is not new)
        return PassResult(self.honest)


@dataclass(frozen=True)
class Crash(Pass):
    """Raises at the first sine."""

    name: ClassVar[str] = "crash"
    summary: ClassVar[str] = "raises"

    def apply(self, program: CapturedProgram, context: PassContext) -> PassResult:
        for node in program.graph_module.graph.nodes:
            if node.target is ATEN.sin.default:
                raise ZeroDivisionError("by zero")
        return PassResult(False)


@dataclass(frozen=True)
class DropOutput(Pass):
    """Returns the first output twice, or only once."""

    name: ClassVar[str] = "drop-output"
    summary: ClassVar[str] = "loses an output"

    def apply(self, program: CapturedProgram, context: PassContext) -> PassResult:
        output = next(iter(reversed(program.graph_module.graph.nodes)))
        output.args = ((output.args[0][0],),)
        return PassResult(True)


@dataclass(frozen=True)
class ForgetsResult(Pass):
    """Returns nothing."""

    name: ClassVar[str] = "forgets-result"
    summary: ClassVar[str] = "returns None"

    def apply(self, program: CapturedProgram, context: PassContext) -> Any:
        return None


@dataclass
class Journal(Instrument):
    """Writes down what it is told."""

    events: list[Any] = field(default_factory=list)
    refuse: Exception | None = None

    def before_pipeline(self, program: CapturedProgram, pipeline: Pipeline) -> None:
        self.events.append(("before", str(pipeline), len(program.graph_module.graph.nodes)))

    def after_pass(self, index: int, item: Pass, program: CapturedProgram, result: PassResult, seconds: float) -> None:
        self.events.append(("after", index, item.name, len(program.graph_module.graph.nodes)))
        assert seconds >= 0
        if self.refuse:
            raise self.refuse

    def pass_failed(self, index: int, item: Pass, program: CapturedProgram, error: Exception) -> None:
        self.events.append(("failed", index, item.name, type(error).__name__))

    def after_pipeline(self, program: CapturedProgram) -> None:
        self.events.append("end")


@pytest.fixture
def program(trace: Trace) -> CapturedProgram:
    return trace(lambda x: (x.sin().cos(), x + 1), torch.randn(3, 4))


def test_passes_run_in_order_and_each_gives_a_record(
    program: CapturedProgram, context: PassContext, run: Callable[..., Any]
) -> None:
    x = torch.randn(3, 4)
    records = run_pipeline(program, Pipeline((Silent(), Negate(), Negate(honest=True))), context)
    assert [(r.name, r.text, r.nodes_before, r.nodes_after) for r in records] == [
        ("silent", "silent", 5, 5),
        ("negate", "negate", 5, 6),
        ("negate", "negate", 6, 7),
    ]
    assert [r.result.modified for r in records] == [False, True, True]
    torch.testing.assert_close(run(program, x)[0], [x.sin().cos(), x + 1])


def test_the_graph_module_runs_what_the_graph_says(program: CapturedProgram, context: PassContext) -> None:
    x = torch.randn(3, 4)
    run_pipeline(program, Pipeline((Negate(),)), context)
    assert torch.equal(program.graph_module(x)[0], (-x.sin()).cos())


def test_instruments_hear_every_event_in_order(program: CapturedProgram, context: PassContext) -> None:
    journal, timing = Journal(), TimePasses()
    run_pipeline(program, Pipeline((Silent(), Negate())), context, [journal, timing])
    assert journal.events == [
        ("before", "silent,negate", 5),
        ("after", 1, "silent", 5),
        ("after", 2, "negate", 6),
        "end",
    ]
    assert [name for name, _ in timing.seconds] == ["silent", "negate"]
    assert timing.total == pytest.approx(sum(seconds for _, seconds in timing.seconds))


def test_a_raising_pass_names_itself_the_node_and_the_remedy(program: CapturedProgram, context: PassContext) -> None:
    journal = Journal()
    for node in program.graph_module.graph.nodes:
        node.meta["stack_trace"] = '  File "model.py", line 12, in forward\n    return x.sin()'
    with pytest.raises(CompileError) as raised:
        run_pipeline(program, Pipeline((Negate(), Crash(), Silent())), context, [journal])
    message = str(raised.value)
    parts = ["pass 2 'crash'", "node 'sin'", "aten.sin", "model.py:12", "ZeroDivisionError: by zero"]
    assert [part for part in [*parts, "--disable-pass crash"] if part not in message] == []
    assert isinstance(raised.value.__cause__, ZeroDivisionError)
    assert journal.events[1:] == [("after", 1, "negate", 6), ("failed", 2, "crash", "ZeroDivisionError")]


@pytest.mark.parametrize(
    ("item", "expected"),
    [
        (Negate(honest=False), "changed the graph and returned modified=False"),
        (Negate(typed=False), "does not verify"),
        (DropOutput(), "changed the inputs or outputs"),
        (ForgetsResult(), "returned NoneType instead of a PassResult"),
    ],
)
def test_a_pass_that_breaks_its_contract_is_an_error(
    item: Pass, expected: str, program: CapturedProgram, context: PassContext
) -> None:
    journal = Journal()
    with pytest.raises(CompileError) as raised:
        run_pipeline(program, Pipeline((item,)), context, [journal])
    message = str(raised.value)
    assert f"pass 1 '{item.name}'" in message and expected in message and f"--disable-pass {item.name}" in message
    assert journal.events[-1] == ("failed", 1, item.name, "CompileError")


def test_the_verifier_can_be_left_out(program: CapturedProgram, context: PassContext) -> None:
    assert run_pipeline(program, Pipeline((Negate(typed=False),)), context, verify=False)[0].result.modified


def test_a_program_that_does_not_verify_is_refused_before_any_pass(
    program: CapturedProgram, context: PassContext
) -> None:
    journal = Journal()
    program.inputs = (replace(program.inputs[0], dtype="float16"),)
    with pytest.raises(CompileError, match="declared float16"):
        run_pipeline(program, Pipeline((Negate(),)), context, [journal])
    assert journal.events == []


def test_an_instruments_own_error_passes_through(program: CapturedProgram, context: PassContext) -> None:
    journal = Journal(refuse=NumericsError("too far off"))
    with pytest.raises(NumericsError, match="too far off"):
        run_pipeline(program, Pipeline((Silent(),)), context, [journal])
    assert journal.events[-1] == ("failed", 1, "silent", "NumericsError")


def test_fingerprints_tell_literals_by_type_and_bits(trace: Trace) -> None:
    x = torch.randn(3)
    literals = [0.0, -0.0, 0, 1e-5, 1e-6, float("nan"), float("inf"), True]
    prints = [graph_fingerprint(trace(partial(torch.add, other=value), x).graph_module) for value in literals]
    assert len(set(prints)) == len(literals)
    again = graph_fingerprint(trace(partial(torch.add, other=float("nan")), x).graph_module)
    assert again == prints[5]


def remark(kind: Any, node: str, score: int = 0, via: Any = "pattern") -> Remark:
    return Remark(kind, "fuse-x", f"about {node}", node, "model.py:3" if score else "", score=score, via=via)


def record(name: str, *remarks: Remark, fusion: bool = True) -> PassRecord:
    return PassRecord(name, name, fusion, PassResult(bool(remarks), remarks), 0.0, 3, 3)


def test_the_summary_has_an_entry_for_every_rule_tried() -> None:
    records = [
        record("canonicalize", remark("passed", "any"), fusion=False),
        record("fuse-x", remark("passed", "a"), remark("missed", "b", 9), remark("passed", "c")),
        record("fuse-y", remark("missed", "far", 1), remark("missed", "near", 5), remark("missed", "later", 5)),
        record("fuse-z"),
        record("fuse-m", remark("passed", "p", via="mark"), remark("passed", "q")),
    ]
    assert fusion_summary(records) == [
        {"rule": "fuse-x", "via": "pattern", "count": 2, "nodes": ["a", "c"], "reason": ""},
        {"rule": "fuse-y", "via": "pattern", "count": 0, "nodes": [], "reason": "about near (node 'near', model.py:3)"},
        {
            "rule": "fuse-z",
            "via": "pattern",
            "count": 0,
            "nodes": [],
            "reason": "nothing in the graph resembles what it looks for.",
        },
        {"rule": "fuse-m", "via": "mark", "count": 1, "nodes": ["p"], "reason": ""},
        {"rule": "fuse-m", "via": "pattern", "count": 1, "nodes": ["q"], "reason": ""},
    ]


def test_a_required_fusion_that_fired_is_no_error() -> None:
    config = CompileConfig(required_fusions=("fuse-x",))
    check_required_fusions([record("fuse-x"), record("fuse-x", remark("passed", "a"))], config)


def test_a_required_fusion_that_did_not_fire_says_why() -> None:
    records = [record("fuse-x", remark("passed", "a")), record("fuse-y", remark("missed", "near", 5))]
    config = CompileConfig(required_fusions=("fuse-x", "fuse-y"))
    with pytest.raises(RequiredFusionError) as raised:
        check_required_fusions(records, config)
    assert raised.value.exit_code == 4
    assert "fuse-y: about near (node 'near', model.py:3)" in str(raised.value) and "fuse-x" not in str(raised.value)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (CompileConfig(opt_level=0), "-O0 runs no passes"),
        (CompileConfig(disabled_passes=("fuse-sparse-attention",)), "--disable-pass fuse-sparse-attention"),
        (CompileConfig(passes="canonicalize"), "--passes 'canonicalize' leaves it out"),
        (CompileConfig(stop_after="canonicalize"), "--stop-after canonicalize"),
    ],
)
def test_a_required_fusion_turned_off_by_another_flag_is_not_silent(config: CompileConfig, expected: str) -> None:
    config = replace(config, required_fusions=("fuse-sparse-attention",))
    with pytest.raises(RequiredFusionError) as raised:
        check_required_fusions([], config)
    assert "fuse-sparse-attention: it was not run" in str(raised.value) and expected in str(raised.value)
