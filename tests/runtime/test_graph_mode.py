"""Graph mode with a device that records instead of capturing: what is captured, when, and that no step is stale."""

import copy
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kimigraph
from kimigraph.capture import capture_module
from kimigraph.codegen import build_artifact
from kimigraph.ir.config import CompileConfig
from kimigraph.ir.errors import UsageError
from kimigraph.ir.manifest import Manifest
from kimigraph.run import run_artifact
from kimigraph.runtime.executor import Executor
from kimigraph.runtime.graphs import GraphCaptureError, GraphMode, GraphModeWarning
from kimigraph.runtime.graphs.results import View, results_of

CACHE = "cache.0.sum"


class Recorder:
    """Stands for a GPU: a capture runs nothing that lasts, a replay runs the step on the captured arguments."""

    def __init__(self) -> None:
        self.turn = threading.RLock()
        self.recording = self.nested = False
        self.captures = self.replays = 0
        self.captured: list[Any] = []

    def capturing(self) -> bool:
        return self.nested

    def capture(self, call: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        self.recording = True
        try:
            outputs = call()
        finally:
            self.recording = False
        self.captures += 1
        step, arguments = self.captured.pop()

        def replay() -> None:
            self.replays += 1
            for kept, value in zip(outputs, step(*arguments), strict=True):
                kept.copy_(value)

        return replay, outputs

    def watch(self, executor: Executor) -> Executor:
        """The executor, whose step on the device leaves no trace while it is captured."""
        step: Any = executor.step
        self.program: dict[str, Any] = step.__wrapped__.__globals__

        def watched(*arguments: Tensor) -> Any:
            if not self.recording:
                return step(*arguments)
            outputs = step(*(argument.clone() for argument in arguments))
            self.captured.append((step, arguments))
            return outputs

        executor.step = watched
        return executor


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def mode(recorder: Recorder) -> GraphMode:
    return GraphMode(recorder)


@pytest.fixture
def executor(recorder: Recorder, mode: GraphMode, built: Path, toy: Any) -> Executor:
    watched = recorder.watch(Executor(built, dict(toy.state_dict())))
    mode.adopt(watched)
    return watched


@pytest.fixture
def eager(built: Path, toy: Any) -> Executor:
    return Executor(built, copy.deepcopy(dict(toy.state_dict())))


def inputs(count: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        yield torch.randn(4, 4, generator=generator)


def same(one: Any, other: Any) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_steps_equal_those_without_graphs(recorder: Recorder, executor: Executor, eager: Executor) -> None:
    cache, wanted_cache = torch.zeros(4), torch.zeros(4)
    kept: list[Any] = []
    for x in inputs(16):
        kept.append((executor(x, cache), eager(x.clone(), wanted_cache)))
        assert torch.equal(cache, wanted_cache)
        assert torch.equal(executor.bound["steps"], eager.bound["steps"])
    assert all(same(ours, theirs) for ours, theirs in kept), "an earlier result was overwritten by a later step"
    assert (recorder.captures, recorder.replays) == (1, 15)


def test_a_capture_ahead_of_the_first_step_changes_nothing(
    recorder: Recorder, mode: GraphMode, executor: Executor, eager: Executor
) -> None:
    x, cache = torch.randn(4, 4), torch.full((4,), 3.0)
    kept = x.clone()
    mode.capture(executor, (x, cache))
    mode.capture(executor, (x, cache))
    assert torch.equal(cache, torch.full((4,), 3.0)) and torch.equal(x, kept)
    assert executor.bound["steps"].item() == 0
    assert same(executor(x, cache), eager(kept, torch.full((4,), 3.0)))
    assert (recorder.captures, recorder.replays) == (1, 1)


def test_caches_that_were_replaced_are_read_and_written_where_they_are(
    recorder: Recorder, mode: GraphMode, executor: Executor, eager: Executor
) -> None:
    first, second = torch.zeros(4), torch.ones(4)
    for cache in (first, first, second, second, second, first):
        wanted, before = cache.clone(), [first.clone(), second.clone()]
        (x,) = inputs(1)
        assert same(executor(x, cache), eager(x, wanted))
        assert torch.equal(cache, wanted)
        other, kept = (second, before[1]) if cache is first else (first, before[0])
        assert torch.equal(other, kept)
    assert recorder.captures == 2, "the graph over the first cache was there when it came back"
    assert any(f"other tensors than before ({CACHE})" in remark for remark in mode.remarks)


def test_caches_that_move_with_every_step_are_never_captured(recorder: Recorder, executor: Executor) -> None:
    held: list[Tensor] = []
    with pytest.warns(GraphModeWarning, match=rf"16 steps in a row.*{CACHE}.*in place"):
        for x in inputs(20):
            held.append(torch.zeros(4))
            executor(x, held[-1])
    assert recorder.captures == 0


def test_weights_changed_in_place_are_seen(executor: Executor, toy: Any) -> None:
    x, cache = torch.ones(4, 4), torch.zeros(4)
    for _ in range(3):
        executor(x, cache)
    toy.weight.zero_()
    assert not executor(x, cache)[0].any()


def test_results_may_lie_in_the_graphs_memory(recorder: Recorder, built: Path, toy: Any) -> None:
    mode, watched = GraphMode(recorder, reuse_outputs=True), recorder.watch(Executor(built, dict(toy.state_dict())))
    mode.adopt(watched)
    cache = torch.zeros(4)
    _, second, third = (watched(x, cache) for x in inputs(3))
    assert [a.data_ptr() for a in second] == [b.data_ptr() for b in third]


def build(directory: Path, rows: int, model: nn.Module) -> Path:
    """The toy's artifact for another shape."""
    example = (torch.randn(rows, 4), {CACHE: torch.zeros(4)})
    directory.mkdir()
    build_artifact(capture_module(model, example, {}, CompileConfig()), "cpu:reference", directory, self_test=False)
    return directory


def test_two_shapes_that_alternate_are_captured_once_each(
    recorder: Recorder, mode: GraphMode, executor: Executor, toy: Any, tmp_path: Path
) -> None:
    other = recorder.watch(Executor(build(tmp_path / "two", 2, toy), dict(toy.state_dict())))
    mode.adopt(other)
    cache = torch.zeros(4)
    for _ in range(100):
        executor(torch.ones(4, 4), cache)
        other(torch.ones(2, 4), cache)
    assert recorder.captures == mode.captured == 2


def test_graphs_are_bounded_by_an_option_that_the_message_names(
    recorder: Recorder, built: Path, toy: Any, eager: Executor
) -> None:
    mode = GraphMode(recorder, max_graphs=2)
    executor = recorder.watch(Executor(built, dict(toy.state_dict())))
    mode.adopt(executor)
    caches = [torch.zeros(4) for _ in range(3)]
    with pytest.warns(GraphModeWarning, match=r"keeps 2 CUDA graphs.*Raise max_graphs"):
        for cache in (*caches, *caches):
            executor(torch.ones(4, 4), cache)
    assert (recorder.captures, mode.captured) == (3, 2)
    executor(torch.ones(4, 4), caches[2])
    executor(torch.ones(4, 4), caches[1])
    assert recorder.captures == 3, "the two used last were kept"
    wanted = caches[0].clone()
    assert same(executor(torch.ones(4, 4), caches[0]), eager(torch.ones(4, 4), wanted))
    assert torch.equal(caches[0], wanted) and mode.captured <= 2
    mode.forget(executor)
    assert mode.captured == 0


def test_at_least_one_graph_is_kept(recorder: Recorder) -> None:
    with pytest.raises(UsageError, match="max_graphs is 0"):
        GraphMode(recorder, max_graphs=0)


def test_a_program_is_in_one_graph_mode(executor: Executor) -> None:
    with pytest.raises(UsageError, match="in a graph mode already"):
        GraphMode(Recorder()).adopt(executor)


def test_a_capture_of_the_callers_is_refused(recorder: Recorder, executor: Executor) -> None:
    recorder.nested = True
    with pytest.raises(UsageError, match=r"inside a capture of the caller's.*Leave cuda_graph out"):
        executor(torch.ones(4, 4), torch.zeros(4))


def test_what_cannot_be_captured_is_refused_by_node(recorder: Recorder, executor: Executor) -> None:
    """The second step is the one that is captured; it and all later ones are refused, none runs on another road."""
    aten, cache = recorder.program["aten"], torch.zeros(4)

    class Waits:
        def __getattr__(self, name: str) -> Any:
            if recorder.recording and name == "relu":
                raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nmore")
            return getattr(aten, name)

    recorder.program["aten"] = Waits()
    executor(torch.ones(4, 4), cache)
    for _ in range(2):
        with pytest.raises(GraphCaptureError, match=r"node relu\w* \(program.py, line \d+: aten.relu.*not permitted"):
            executor(torch.ones(4, 4), cache)


def test_a_failure_of_the_device_itself_names_no_node(
    recorder: Recorder, executor: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(call: Callable[[], Any]) -> Any:
        raise RuntimeError("no pool")

    executor(torch.ones(4, 4), torch.zeros(4))
    monkeypatch.setattr(recorder, "capture", fails)
    with pytest.raises(GraphCaptureError, match=r"a part of it could not be captured \(RuntimeError: no pool"):
        step_twice(executor)


def step_twice(executor: Executor) -> None:
    """A second step on the same cache, which is captured."""
    cache = torch.zeros(4)
    for _ in range(2):
        executor(torch.ones(4, 4), cache)


class Picks(nn.Module):
    """Writes where a mask is set: the host makes a list of the places."""

    def forward(self, x: Tensor, mask: Tensor, value: Tensor) -> Tensor:
        return torch.ops.aten.index_put.default(x, [mask], value)


def test_a_program_that_waits_for_the_device_is_refused_before_it_runs(recorder: Recorder, tmp_path: Path) -> None:
    example = (torch.zeros(4), torch.tensor([True, False, True, False]), torch.ones(2))
    captured = capture_module(Picks(), example, {}, CompileConfig())
    build_artifact(captured, "cpu:reference", tmp_path, self_test=False)
    assert list(Manifest.read(tmp_path).uncapturable) == ["index_put"]
    with pytest.raises(GraphCaptureError, match=r"node index_put indexes by a mask.*without cuda_graph"):
        GraphMode(recorder).adopt(Executor(tmp_path, {}))
    executor = Executor(tmp_path, {})
    with pytest.warns(GraphModeWarning, match=r"node index_put indexes by a mask.*run without a graph"):
        GraphMode(recorder).adopt(executor, optional=True)
    assert executor.stepper is None


def test_where_graphs_are_optional_what_cannot_be_captured_is_told_and_run(
    recorder: Recorder, built: Path, toy: Any, eager: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(call: Callable[[], Any]) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    executor = recorder.watch(Executor(built, copy.deepcopy(dict(toy.state_dict()))))
    GraphMode(recorder).adopt(executor, optional=True)
    monkeypatch.setattr(recorder, "capture", fails)
    cache, wanted_cache, told = torch.zeros(4), torch.zeros(4), list[str]()
    for x in inputs(4):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = executor(x, cache)
        told += [str(one.message) for one in caught]
        assert same(found, eager(x.clone(), wanted_cache)) and torch.equal(cache, wanted_cache)
    [message] = told
    assert "not permitted" in message and message.endswith("Its steps run without a graph")


def test_a_result_that_is_a_view_of_an_argument_stays_one() -> None:
    captured = [torch.zeros(3), torch.zeros(10)[2:8]]
    results = results_of([captured[1][1:3], captured[1].view(2, 3).T, torch.ones(2)], captured)
    given = [torch.zeros(3), torch.arange(20.0)[7:13]]
    views = [result.of(given) for result in results]
    assert [isinstance(result, View) for result in results] == [True, True, False]
    assert torch.equal(views[0], given[1][1:3]) and torch.equal(views[1], given[1].view(2, 3).T)
    views[0].fill_(-1)
    assert given[1].tolist() == [7, -1, -1, 10, 11, 12]


TARGETS = {"cpu:reference": "cpu:reference", "auto": "cpu:reference"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is missing where there is no GPU")
@pytest.mark.parametrize("target", TARGETS)
def test_a_cpu_has_no_graphs_and_says_so(target: str, built: Path, toy: Any) -> None:
    message = rf"target '{TARGETS[target]}' run on the CPU: leave cuda_graph \(--cuda-graph\) out"
    with pytest.raises(UsageError, match=message):
        kimigraph.optimize(toy, (torch.ones(4, 4), {CACHE: torch.zeros(4)}), CompileConfig(target, cuda_graph=True))
    with pytest.raises(UsageError, match=message):
        kimigraph.load(built, toy.state_dict(), cuda_graph=True)
    with pytest.raises(UsageError, match=message):
        run_artifact(built, None, None, 1, cuda_graph=True)


def test_capture_without_graph_mode_says_how_to_have_it(built: Path, toy: Any) -> None:
    compiled = kimigraph.load(built, toy.state_dict())
    assert compiled.graphs is None
    with pytest.raises(UsageError, match="cuda_graph=True"):
        compiled.capture(torch.ones(4, 4), {CACHE: torch.zeros(4)})
