"""``--dump-passes``: what is written, when, and what is never touched; and the tools that read it."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

import kimigraph
from kimigraph.ir.errors import CompileError, UsageError
from kimigraph.ir.fake import infer
from kimigraph.ir.program import CapturedProgram
from kimigraph.ir.remarks import PassResult, Remark
from kimigraph.passes import DumpPasses, Pass, PassContext, Pipeline, run_pipeline
from kimigraph.tools.dumps import diff_dumps, list_dumps, show_dump

ATEN = torch.ops.aten


@dataclass(frozen=True)
class DoubleNegate(Pass):
    """Puts two negations behind every sine: the same values by another graph."""

    name: ClassVar[str] = "double-negate"
    summary: ClassVar[str] = "negates twice"

    def apply(self, program: CapturedProgram, context: PassContext) -> PassResult:
        graph = program.graph_module.graph
        remarks: list[Remark] = []
        for node in [node for node in graph.nodes if node.target is ATEN.sin.default]:
            with graph.inserting_after(node):
                inner = graph.call_function(ATEN.neg.default, (node,))
            with graph.inserting_after(inner):
                outer = graph.call_function(ATEN.neg.default, (inner,))
            infer(inner)
            infer(outer)
            node.replace_all_uses_with(outer, lambda user, inner=inner: user is not inner)
            remarks.append(Remark("passed", self.name, "negated twice", outer.name, "model.py:7"))
        return PassResult(bool(remarks), tuple(remarks), {"sines": len(remarks)})


@dataclass(frozen=True)
class Look(Pass):
    """Looks only."""

    name: ClassVar[str] = "look"
    summary: ClassVar[str] = "looks"

    def apply(self, program: CapturedProgram, context: PassContext) -> PassResult:
        return PassResult(False, (Remark("missed", self.name, "no cosine to speak of", "sin"),))


@dataclass(frozen=True)
class Crash(Pass):
    """Raises."""

    name: ClassVar[str] = "crash"
    summary: ClassVar[str] = "raises"

    def apply(self, program: CapturedProgram, context: PassContext) -> PassResult:
        raise ValueError("no way on")


def step(x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    state.add_(x.sin())
    return state.cos()


@pytest.fixture
def program(trace: Callable[..., CapturedProgram]) -> CapturedProgram:
    return trace(step, torch.randn(3, 4), torch.randn(3, 4))


@pytest.fixture
def dumps(tmp_path: Path, program: CapturedProgram, context: PassContext) -> Path:
    directory = tmp_path / "dumps"
    run_pipeline(program, Pipeline((Look(), DoubleNegate())), context, [DumpPasses(directory)])
    return directory


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if not path.name.startswith("."))


def test_one_script_a_pass_and_a_diff_where_something_changed(dumps: Path) -> None:
    assert names(dumps) == [
        "000-capture.py",
        "001-look.py",
        "002-double-negate.diff",
        "002-double-negate.py",
        "graph.dot",
        "remarks.jsonl",
        "schedule.json",
        "timings.json",
    ]
    difference = (dumps / "002-double-negate.diff").read_text()
    assert sum("aten.neg.default" in line for line in added(difference)) == 2
    assert "002-double-negate" in difference.splitlines()[1] and '"""' not in "".join(added(difference))


def test_remarks_and_timings_are_records(dumps: Path) -> None:
    remarks = [json.loads(line) for line in (dumps / "remarks.jsonl").read_text().splitlines()]
    assert [(r["index"], r["kind"], r["pass_name"], r["node"], r["source"]) for r in remarks] == [
        (1, "missed", "look", "sin", ""),
        (2, "passed", "double-negate", "neg_default_1", "model.py:7"),
    ]
    passes = json.loads((dumps / "timings.json").read_text())["passes"]
    assert [(p["index"], p["pass"], p["nodes"]) for p in passes] == [
        (0, "capture", 6),
        (1, "look", 6),
        (2, "double-negate", 8),
    ]
    assert passes[2]["statistics"] == {"sines": 1} and passes[2]["seconds"] >= 0


def test_the_picture_has_every_node_and_edge(dumps: Path, program: CapturedProgram) -> None:
    text = (dumps / "graph.dot").read_text()
    graph = program.graph_module.graph
    assert all(f'"{node.name}" [label=' in text for node in graph.nodes)
    edges = [f'"{source.name}" -> "{node.name}"' for node in graph.nodes for source in node.all_input_nodes]
    assert all(edge in text for edge in edges) and text.count("->") == len(edges)
    assert text.startswith("digraph") and text.count("{") == text.count("}")


def test_every_dump_runs_as_a_script_with_the_captures_checksums(dumps: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(kimigraph.__file__).parents[1])}
    results = []
    for name in ("000-capture.py", "002-double-negate.py"):
        done = subprocess.run([sys.executable, str(dumps / name)], capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr
        lines = [line.split() for line in done.stdout.splitlines()]
        results.append({line[0]: [float(number) for number in line[1:]] for line in lines})
    assert len(results[0]) == 2  # the output and the updated state
    assert all(sum(map(abs, numbers)) > 0.1 for numbers in results[0].values())
    assert results[0] == results[1]


def test_a_crash_leaves_everything_up_to_it(tmp_path: Path, program: CapturedProgram, context: PassContext) -> None:
    pipeline = Pipeline((DoubleNegate(), Crash(), Look()))
    with pytest.raises(CompileError, match="crash"):
        run_pipeline(program, pipeline, context, [DumpPasses(tmp_path)])
    assert names(tmp_path) == [
        "000-capture.py",
        "001-double-negate.diff",
        "001-double-negate.py",
        "002-crash.failed.txt",
        "graph.dot",
        "remarks.jsonl",
        "reproducer.py",
        "timings.json",
    ]
    failure = (tmp_path / "002-crash.failed.txt").read_text()
    assert failure.startswith("ValueError: no way on") and "aten.neg.default" in failure
    last = json.loads((tmp_path / "timings.json").read_text())["passes"][-1]
    assert last == {"index": 2, "pass": "crash", "failed": "ValueError: no way on"}
    assert [(e.index, e.name, e.failed) for e in list_dumps(tmp_path)][-1] == (2, "crash", True)


def test_files_are_complete_after_each_pass(tmp_path: Path, program: CapturedProgram, context: PassContext) -> None:
    @dataclass(frozen=True)
    class Peek(Pass):
        """Lists the dump directory while the pipeline runs."""

        name: ClassVar[str] = "peek"
        summary: ClassVar[str] = "lists"

        def apply(self, program: CapturedProgram, context: PassContext) -> PassResult:
            seen.append((names(tmp_path), len((tmp_path / "remarks.jsonl").read_text().splitlines())))
            return PassResult(False)

    seen: list[Any] = []
    run_pipeline(program, Pipeline((Peek(), Look(), Peek())), context, [DumpPasses(tmp_path)])
    assert seen == [
        (["000-capture.py", "remarks.jsonl", "timings.json"], 0),
        (["000-capture.py", "001-peek.py", "002-look.py", "remarks.jsonl", "timings.json"], 1),
    ]


def test_a_directory_with_other_files_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    (tmp_path / "001-look.py").write_text("mine")
    with pytest.raises(UsageError, match=r"001-look\.py, thesis\.tex"):
        DumpPasses(tmp_path)
    assert names(tmp_path) == ["001-look.py", "thesis.tex"]
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


def test_a_file_in_the_place_of_the_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("text")
    with pytest.raises(UsageError, match="that is a file"):
        DumpPasses(tmp_path / "file")


def test_an_own_directory_is_used_again_without_leftovers(
    dumps: Path, program: CapturedProgram, context: PassContext
) -> None:
    run_pipeline(program, Pipeline((Look(),)), context, [DumpPasses(dumps)])
    assert names(dumps) == [
        "000-capture.py",
        "001-look.py",
        "graph.dot",
        "remarks.jsonl",
        "schedule.json",
        "timings.json",
    ]


def test_an_own_directory_with_a_file_added_is_refused(dumps: Path) -> None:
    before = {name: (dumps / name).read_text() for name in names(dumps)}
    (dumps / "notes.txt").write_text("my notes")
    with pytest.raises(UsageError, match=r"notes\.txt"):
        DumpPasses(dumps)
    assert {name: (dumps / name).read_text() for name in before} == before


def test_a_marker_cannot_name_files_outside_or_of_other_kinds(tmp_path: Path) -> None:
    directory = tmp_path / "dumps"
    directory.mkdir()
    outside = tmp_path / "outside.py"
    outside.write_text("precious")
    (directory / "data.csv").write_text("1,2")
    (directory / ".kimigraph-dumps.json").write_text(json.dumps({"files": ["../outside.py", "data.csv", 7]}))
    with pytest.raises(UsageError, match=r"data\.csv"):
        DumpPasses(directory)
    assert outside.read_text() == "precious" and (directory / "data.csv").exists()


@pytest.mark.parametrize("marker", ["", "[]", "{", '{"files": 3}'])
def test_a_damaged_marker_counts_as_none(tmp_path: Path, marker: str) -> None:
    (tmp_path / ".kimigraph-dumps.json").write_text(marker)
    (tmp_path / "000-capture.py").write_text("whose?")
    with pytest.raises(UsageError, match=r"000-capture\.py"):
        DumpPasses(tmp_path)
    assert (tmp_path / "000-capture.py").read_text() == "whose?"


def test_dumps_are_listed(dumps: Path) -> None:
    assert [(e.index, e.name, e.file, e.modified, e.failed, e.nodes) for e in list_dumps(dumps)] == [
        (0, "capture", "000-capture.py", False, False, 6),
        (1, "look", "001-look.py", False, False, 6),
        (2, "double-negate", "002-double-negate.py", True, False, 8),
    ]


def test_dumps_are_shown_and_compared(dumps: Path) -> None:
    assert show_dump(dumps, 0) == (dumps / "000-capture.py").read_text()
    assert diff_dumps(dumps, 1) == ""
    assert diff_dumps(dumps, 2) == (dumps / "002-double-negate.diff").read_text()
    forward, backward = diff_dumps(dumps, 0, 2), diff_dumps(dumps, 2, 0)
    assert added(forward) == removed(backward) != []
    assert removed(forward) == added(backward)
    assert diff_dumps(dumps, 1, 1) == ""


def added(difference: str) -> list[str]:
    return [line[1:] for line in difference.splitlines() if line.startswith("+") and not line.startswith("+++")]


def removed(difference: str) -> list[str]:
    return [line[1:] for line in difference.splitlines() if line.startswith("-") and not line.startswith("---")]


@pytest.mark.parametrize(
    ("ask", "expected"),
    [
        (lambda d: list_dumps(d / "nowhere"), "nowhere"),
        (lambda d: show_dump(d, 7), "no dump 7. It has: 0 capture, 1 look, 2 double-negate"),
        (lambda d: diff_dumps(d, 0), "nothing comes before it"),
        (lambda d: diff_dumps(d, 0, 9), "no dump 9"),
    ],
)
def test_what_is_not_there_is_a_usage_error(dumps: Path, ask: Callable[[Path], Any], expected: str) -> None:
    with pytest.raises(UsageError) as raised:
        ask(dumps)
    assert expected in str(raised.value)


def test_an_empty_directory_holds_no_dumps(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds no dumps"):
        list_dumps(tmp_path)
