"""Bisecting and reducing: crashes, invalid graphs, passes that announce nothing, and the files that replay them."""

import sys
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from runpy import run_path
from types import ModuleType
from typing import ClassVar

import pytest
import torch

from kimigraph.ir.config import CompileConfig
from kimigraph.ir.data_sets import data_sets
from kimigraph.ir.program import CapturedProgram
from kimigraph.ir.remarks import PassResult
from kimigraph.passes import Pass, PassContext, Pipeline, default_pipeline, run_pipeline
from kimigraph.passes.gate import NumberedRewrites
from kimigraph.tools.bisect import FailingPass, bisect_rewrites, find_failing_pass
from kimigraph.tools.extract import extract
from kimigraph.tools.failure import run_pass
from kimigraph.tools.numerics import Reference
from kimigraph.tools.reduce import reduce_program
from kimigraph.tools.replay import main as replay
from kimigraph.tools.reproducer import write_reproducer

ATEN = torch.ops.aten
CRASHING = '''
from dataclasses import dataclass
from typing import ClassVar

import torch

from kimigraph.ir.program import CapturedProgram
from kimigraph.ir.remarks import PassResult
from kimigraph.passes import Pass, PassContext


@dataclass(frozen=True)
class Crash(Pass):
    """Fails at a sigmoid that is added to."""

    name: ClassVar[str] = "crash"
    summary: ClassVar[str] = "fail"

    def apply(self, program: CapturedProgram, context: PassContext) -> PassResult:
        for node in program.graph_module.graph.nodes:
            if node.target is torch.ops.aten.sigmoid.default and context.allow(node.name):
                if any(user.target is torch.ops.aten.add.Tensor for user in node.users):
                    raise ValueError("no sums here")
        return PassResult(False)
'''


def silent(message: str) -> None:
    del message


def fail(captured: CapturedProgram, item: Pass, config: CompileConfig) -> FailingPass:
    failing = find_failing_pass(captured, Pipeline((item,)), config, silent)
    assert failing is not None
    return failing


@dataclass(frozen=True)
class ForgetValue(Pass):
    """Leaves nodes without a recorded value."""

    name: ClassVar[str] = "forget-value"
    summary: ClassVar[str] = "leave nodes without a value"

    def apply(self, program: CapturedProgram, context: PassContext) -> PassResult:
        for node in program.graph_module.graph.nodes:
            if node.target is ATEN.silu.default and context.allow(node.name) and node.name == "silu_1":
                node.meta.pop("val")
        return PassResult(True)


def test_right_passes_have_no_fault(captured: CapturedProgram, config: CompileConfig) -> None:
    assert find_failing_pass(captured, default_pipeline(config), config, silent) is None


def test_a_crash_is_found_reduced_and_replayed(
    captured: CapturedProgram, config: CompileConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "crashing_pass.py").write_text(CRASHING)
    monkeypatch.syspath_prepend(str(tmp_path))
    crashing_pass = import_module("crashing_pass")

    failing = fail(captured, crashing_pass.Crash(), config)
    assert failing.failure.kind == "crash" and failing.failure.error == "ValueError"
    assert "at node 'sigmoid_7'" in failing.failure.message and "moe.py:" in failing.failure.message
    found = bisect_rewrites(failing, captured, config, silent)
    assert found.rewrite.name == "sigmoid_7" and found.rewrite.alone
    least = reduce_program(failing, config, silent)
    nodes = least.failing.before.graph_module.graph.nodes
    assert len(nodes) <= 8 and sum(node.target is ATEN.sigmoid.default for node in nodes) == 1

    path = tmp_path / "least.py"
    write_reproducer(path, least, {})
    with pytest.raises(SystemExit) as caught:
        replay([str(path)])
    assert caught.value.code == 1
    monkeypatch.setattr(crashing_pass.Crash, "apply", lambda self, program, context: PassResult(False))
    with pytest.raises(SystemExit) as caught:
        replay([str(path)])
    assert caught.value.code == 0


def test_an_invalid_graph_is_a_failure(captured: CapturedProgram, config: CompileConfig) -> None:
    failing = fail(captured, ForgetValue(), config)
    assert failing.failure.kind == "invalid" and "silu_1" in failing.failure.message
    assert bisect_rewrites(failing, captured, config, silent).rewrite.name == "silu_1"
    least = reduce_program(failing, config, silent)
    assert len(least.failing.before.graph_module.graph.nodes) <= 5


def test_a_pass_that_announces_nothing_is_narrowed_down_by_values(
    captured: CapturedProgram, config: CompileConfig, wrong: ModuleType, tmp_path: Path
) -> None:
    failing = fail(captured, wrong.Commute(wrong="dropped-activation", at="silu_1", announce=False), config)
    found = bisect_rewrites(failing, captured, config, silent)
    assert found.rewrite.number == 0 and "silu_1" in found.rewrite.name and found.without is None
    least = reduce_program(failing, config, silent)
    assert len(least.failing.before.graph_module.graph.nodes) == 3
    assert least.rewrite.name == "the pass announces no rewrites; it changed silu_1"


def test_a_fixed_pass_passes_its_reproducer(
    captured: CapturedProgram, config: CompileConfig, wrong: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    least = reduce_program(fail(captured, wrong.Commute(wrong="sign", at="add_2"), config), config, silent)
    write_reproducer(tmp_path / "least.py", least, {})
    for table, code in (({}, 1), ({"sign": wrong.Wrong(wrong.commutes, wrong.swap_arguments)}, 0)):
        monkeypatch.setattr(wrong, "WRONG", {**wrong.WRONG, **table})
        with pytest.raises(SystemExit) as caught:
            replay([str(tmp_path / "least.py")])
        assert caught.value.code == code


def test_the_built_in_passes_announce_their_rewrites(captured: CapturedProgram, config: CompileConfig) -> None:
    reference = Reference(captured, data_sets()[:1])
    program = captured
    some = {"canonicalize": "merge ", "raise-kda": "copy_", "fuse-lightning-indexer": "topk_2"}
    some |= {"fuse-sparse-attention": "softmax_6", "merge-horizontal": "linear"}
    for item in default_pipeline(config):
        gate, none = NumberedRewrites(), NumberedRewrites(lambda number: False)
        run = run_pass(item, program, config, reference, gate)
        idle = run_pass(item, program, config, reference, none)
        assert run.failure is None and idle.failure is None and run.program is not None and idle.program is not None
        assert any(name.startswith(some.get(item.name, "")) for name in gate.announced or [""]), gate.announced
        if item.name in some and item.level == 1:
            assert len(idle.program.graph_module.graph.nodes) > len(run.program.graph_module.graph.nodes)
        program = run.program


def test_a_part_stands_by_itself(captured: CapturedProgram) -> None:
    part = extract(captured, ["index_put", "split_with_sizes"], {"add": (3, 9)})
    graph = part.graph_module.graph
    assert [n.name for n in graph.nodes if n.op == "call_function"] == [
        "split_with_sizes", "getitem_17", "getitem_18", "index_put"
    ]  # fmt: skip
    by_name = {spec.name: spec for spec in part.inputs}
    assert by_name["cache_3_latent"].mutated and by_name["add"].value_range == (3, 9)
    assert [spec.name for spec in part.outputs] == ["getitem_17", "getitem_18", "index_put"]
    assert Reference(part, data_sets()).compare(part).passed


def test_a_program_with_operators_can_be_a_reference(captured: CapturedProgram, config: CompileConfig) -> None:
    program = captured.copy()
    run_pipeline(program, default_pipeline(config), PassContext(config))
    assert any("selects" in node.meta for node in program.graph_module.graph.nodes)
    assert Reference(program, data_sets()[:2]).compare(program).passed


def test_what_is_written_shows_the_failure_by_values(
    captured: CapturedProgram, config: CompileConfig, wrong: ModuleType, tmp_path: Path
) -> None:
    """Booleans from outside are all True, so a part that only marks picks in one fails by picks alone: it is refused.

    A graph that fails by picks alone is written as the pass to run on it, which compares them.
    """
    failing = fail(captured, wrong.Commute(wrong="one-pick-less", at="topk_2"), config)
    least = reduce_program(failing, config, silent)
    part, after = least.failing.before, least.after
    data = least.failing.failure.data
    assert data is not None and after is not None and Reference(part, [data]).shows(after)

    marks = {"topk_2", "getitem_22", "scatter"}
    blind = extract(captured, marks, {})
    reference = Reference(blind, [data])
    run = run_pass(failing.item, blind, config, reference)
    assert run.failure is not None and "picks other entries" in run.failure.message
    assert run.program is not None and not reference.shows(run.program)
    found = bisect_rewrites(FailingPass(1, failing.item, blind, run.failure), blind, config, silent)
    assert found.rewrite.name == "topk_2" and found.after is None
    for bisection, main in ((least, "kimigraph.ir.reproduce"), (found, "kimigraph.tools.replay")):
        path = tmp_path / "written.py"
        write_reproducer(path, bisection, {})
        assert f"from {main} import main" in path.read_text()
        with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as caught:
            patch.setattr(sys, "argv", [str(path)])
            run_path(str(path), run_name="__main__")
        assert caught.value.code == 1
