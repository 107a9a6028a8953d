"""Timelines: the planned schedule, traces of torch's profiler, gaps, names, pictures, and what a node waits for."""

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx import Graph, GraphModule
from typer.testing import CliRunner

from kimigraph.cli.app import make_app
from kimigraph.ir.config import CompileConfig
from kimigraph.ir.device import target_device
from kimigraph.ir.errors import UsageError
from kimigraph.ir.fake import infer
from kimigraph.ir.program import CapturedProgram, InputSpec, OutputSpec
from kimigraph.ir.trace import BUBBLE, FILE, Span, Track, read_timeline, write_timeline
from kimigraph.passes import DumpPasses, PassContext, Pipeline, run_pipeline
from kimigraph.passes.assign_streams import AssignStreams
from kimigraph.passes.scheduling.planned import planned_track
from kimigraph.passes.scheduling.simulation import planned_slots
from kimigraph.passes.verify_schedule import VerifySchedule
from kimigraph.report.timeline_svg import Window, timeline_svg
from kimigraph.tools.idle import idle_of
from kimigraph.tools.kineto import (
    DeviceEvent,
    annotated_events,
    device_events,
    median_replay,
    name_events,
    split_replays,
)
from kimigraph.tools.measured import measured_track
from kimigraph.tools.waiting import waiting

DEVICE = target_device("cuda")
LAUNCH = (DEVICE.launch_seconds + DEVICE.latency_seconds) * 1e6
EVENT = DEVICE.event_seconds * 1e6
ATEN = torch.ops.aten


def diamond() -> CapturedProgram:
    """relu -> (sin -> exp beside cos) -> add; the cosine is also written to a cache, which the last node reads."""
    graph = Graph()
    x, cache = graph.placeholder("x"), graph.placeholder("cache")
    with FakeTensorMode() as mode:
        x.meta["val"], cache.meta["val"] = (mode.from_tensor(torch.empty(8)) for _ in range(2))

    def call(target: Any, *args: Any) -> Any:
        node = graph.call_function(target, args)
        infer(node)
        return node

    top = call(ATEN.relu.default, x)
    left = call(ATEN.exp.default, call(ATEN.sin.default, top))
    right = call(ATEN.cos.default, top)
    call(ATEN.copy_.default, cache, right)
    last = call(ATEN.add.Tensor, left, cache)
    graph.output((last,))
    specs = (
        InputSpec("x", "input", "x", (8,), (1,), "float32"),
        InputSpec("cache", "cache", "cache.0", (8,), (1,), "float32", mutated=True),
    )
    return CapturedProgram(GraphModule(torch.nn.Module(), graph), specs, (OutputSpec("out", "out"),))


def forked() -> CapturedProgram:
    program = diamond()
    AssignStreams(force=True).apply(program, PassContext(CompileConfig(target="cuda")))
    return program


def dumped(directory: Path, program: CapturedProgram) -> Path:
    config = CompileConfig(target="cuda")
    run_pipeline(
        program, Pipeline((AssignStreams(force=True), VerifySchedule())), PassContext(config), [DumpPasses(directory)]
    )
    return directory


def test_one_stream_is_a_row_of_kernels_without_bubbles() -> None:
    program = diamond()
    slots = planned_slots(program.graph_module.graph, DEVICE)
    assert [slot.node.name.partition("_")[0] for slot in slots] == ["relu", "sin", "exp", "cos", "copy", "add"]
    for number, slot in enumerate(slots):
        assert slot.start == pytest.approx(number * LAUNCH, abs=0.01)
        assert slot.behind is (slots[number - 1].node if number else None)
    track = planned_track(program.graph_module.graph, DEVICE)
    assert not [span for span in track.spans if span.kind == BUBBLE]


def test_branches_run_side_by_side_and_bubbles_say_what_they_wait_for() -> None:
    graph = forked().graph_module.graph
    track = planned_track(graph, DEVICE)
    spans = {span.name: span for span in track.kernels}
    assert len(track.lanes) == 2 and track.length < 5 * LAUNCH + 3 * EVENT
    (cos,) = [span for name, span in spans.items() if name.startswith("cos")]
    (relu,) = [span for name, span in spans.items() if name.startswith("relu")]
    (add,) = [span for name, span in spans.items() if name.startswith("add")]
    side = cos if cos.lane else next(span for name, span in spans.items() if name.startswith("sin"))
    assert side.lane == 1 and side.start == pytest.approx(relu.end + EVENT, abs=0.01)
    assert {wait["why"] for wait in add.facts["waits"]} == {"operand", "read after write"}
    bubbles = [span for span in track.spans if span.kind == BUBBLE]
    assert f"waits for {relu.name}" in {span.name for span in bubbles if span.lane == 1}
    assert all(span.start >= 0 and span.length > 0 for span in bubbles)
    assert len(track.arrows) == sum(len(node.meta.get("waits", ())) for node in graph.nodes if node.op != "output")


def test_a_timeline_is_read_back_and_is_what_perfetto_takes(tmp_path: Path) -> None:
    track = planned_track(forked().graph_module.graph, DEVICE)
    write_timeline(tmp_path / "t.json", [track, Track("other", {3: "three"}, (Span("a", 3, 1.0, 2.0),))])
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X", "s", "f"} and {event["pid"] for event in events} == {1, 2}
    # Perfetto makes one lane of threads 0 and of their process' number, and drops what overlaps by a nanosecond.
    assert all(event["tid"] not in (0, event["pid"]) for event in events)
    ends: dict[int, int] = {}
    for event in sorted((event for event in events if event["ph"] == "X"), key=lambda event: event["ts"]):
        begin = round(event["ts"] * 1000)
        assert begin >= ends.get(event["tid"], 0)
        ends[event["tid"]] = begin + round(event["dur"] * 1000)
    first, second = read_timeline(tmp_path / "t.json")
    assert [span.name for span in first.spans] == [span.name for span in track.spans]
    assert first.lanes == track.lanes and first.arrows == track.arrows and first.arrows
    assert second.title == "other" and second.spans[0].end == 3.0 and not second.arrows
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(UsageError, match="no timeline of kimigraph"):
        read_timeline(tmp_path / "bad.json")


def kernel(name: str, start: float, length: float, stream: int = 7, **more: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": "kernel", "name": name, "ts": start, "dur": length, "args": {"stream": stream, **more}}


def test_a_trace_is_cut_into_replays_and_the_median_is_taken() -> None:
    events = [kernel(name, 100 * run + 10 * place + run, 5) for run in range(3) for place, name in enumerate("ab")]
    events[1] = kernel("b", 60, 5)  # the first replay is the longest
    runs = split_replays(device_events([*events, {"ph": "M", "name": "x"}]), 3)
    assert [[event.name for event in run] for run in runs] == [["a", "b"]] * 3
    assert median_replay(runs)[0].start in (101, 202)
    with pytest.raises(UsageError, match="no 4 replays of one graph"):
        split_replays(device_events(events), 4)
    with pytest.raises(UsageError, match="no 2 replays"):
        split_replays(device_events([kernel("a", 0, 1), kernel("b", 2, 1)]), 2)


def test_kernels_are_named_by_the_annotation_of_their_call() -> None:
    note = {"ph": "X", "cat": "user_annotation"}
    call = {"ph": "X", "cat": "cuda_driver", "name": "cuLaunchKernelEx"}
    events = [
        {**note, "name": "node mm", "ts": 0, "dur": 10},
        {**note, "name": "node add", "ts": 10, "dur": 10},
        {**call, "ts": 5, "dur": 1, "args": {"correlation": 1}},
        {**call, "ts": 15, "dur": 1, "args": {"correlation": 2}},
        kernel("gemm", 16, 9, correlation=1),  # runs when the next call is made already
        kernel("triton_add", 30, 2, correlation=2),
    ]
    known = annotated_events(events, "node ")
    assert known == [("mm", "gemm"), ("add", "triton_add")]
    replay = [DeviceEvent("triton_add", 7, 3.0, 2.0, order=2), DeviceEvent("gemm", 7, 4.0, 2.0, order=1)]
    assert name_events(replay, known) == ["add", "mm"]
    twice = [("one", "k"), ("two", "k")]  # by graph node where there is one, else by begin
    assert name_events([DeviceEvent("k", 7, 3.0, 1.0, order=9), DeviceEvent("k", 7, 5.0, 1.0, order=8)], twice) == [
        "two",
        "one",
    ]
    assert name_events([DeviceEvent("k", 7, 5.0, 1.0), DeviceEvent("k", 7, 3.0, 1.0)], twice) == ["two", "one"]
    assert name_events([*replay, DeviceEvent("gemm", 7, 9.0, 1.0)], known) == ["add", "mm", ""]


def test_idle_time_is_what_no_kernel_covers() -> None:
    events = [
        DeviceEvent("a", 1, 10.0, 5.0),
        DeviceEvent("b", 2, 12.0, 2.0),  # inside the first
        DeviceEvent("c", 1, 15.5, 1.0),  # half a microsecond behind it
        DeviceEvent("d", 2, 20.0, 3.0),  # three and a half behind that
    ]
    idle = idle_of(events)
    assert (idle.span, idle.busy, idle.total) == (13.0, 9.0, 4.0)
    assert [(gap.before, gap.length) for gap in idle.gaps] == [(2, 0.5), (3, 3.5)]
    assert idle.beyond == 2.5 and idle.as_dict()["idle_share"] == pytest.approx(4 / 13, abs=1e-4)
    assert idle_of([]).total == 0


def test_a_measured_replay_has_the_planned_names_and_named_gaps() -> None:
    planned = planned_track(forked().graph_module.graph, DEVICE)
    replay = [DeviceEvent("k1", 5, 100.0, 2.0), DeviceEvent("k2", 9, 101.0, 1.5), DeviceEvent("k3", 5, 104.0, 1.0)]
    names = ["relu_default", "", planned.kernels[-1].name]
    track = measured_track(replay, names, planned)
    assert [span.name for span in track.kernels] == ["relu_default", "k2", planned.kernels[-1].name]
    bubbles = {span.name: span for span in track.spans if span.kind == BUBBLE}
    waits = f"{names[2]} waits for {planned.kernels[-1].facts['behind']}"
    assert bubbles[waits].length == pytest.approx(1.5) and track.facts["idle_us"] == 1.5
    overlapping = measured_track([replay[0], DeviceEvent("k4", 5, 101.0, 3.0)], ["a", "b"], None)
    assert {span.lane for span in overlapping.kernels} == {0, 1}


def test_a_picture_shows_every_kernel_of_its_window() -> None:
    track = planned_track(forked().graph_module.graph, DEVICE)
    picture = timeline_svg("a < b", [(track, Window.whole(track))])
    root = ElementTree.fromstring(picture)
    hints = [item.text or "" for item in root.iter("{http://www.w3.org/2000/svg}title")]
    assert {span.name for span in track.spans} == {hint.partition(":")[0] for hint in hints}
    first, last = track.kernels[0].name, track.kernels[1].name
    part = timeline_svg("part", [(track, Window.around(track, first, last))])
    assert part.count("<title>") < picture.count("<title>")


def test_explain_says_why_a_node_waits(tmp_path: Path) -> None:
    directory = dumped(tmp_path / "dumps", diamond())
    track = read_timeline(directory / FILE)[0]
    last = track.kernels[-1].name
    found = waiting(directory, last)
    assert found is not None and found.behind and len(found.waits) == 2
    assert {wait.why for wait in found.waits} == {"operand", "read after write in the storage of cache"}
    assert any("an event on stream" in wait.kept_by for wait in found.waits)
    assert waiting(directory, "x") is None
    result = CliRunner().invoke(make_app(), ["explain", str(directory), "--node", last])
    assert result.exit_code == 0 and "waits for" in result.stdout and "read after write" in result.stdout
    document = json.loads(CliRunner().invoke(make_app(), ["explain", str(directory), "--node", last, "--json"]).stdout)
    assert document["schedule"]["node"] == last


def test_the_command_writes_planned_and_traced_schedule(tmp_path: Path) -> None:
    directory = dumped(tmp_path / "dumps", diamond())
    trace = tmp_path / "trace.json"
    trace.write_text(json.dumps({"traceEvents": [kernel("a", 5, 2), kernel("b", 9, 1)]}))
    out, svg = tmp_path / "both.json", tmp_path / "both.svg"
    arguments = ["timeline", str(directory), "--trace", str(trace), "--out", str(out), "--svg", str(svg), "--json"]
    result = CliRunner().invoke(make_app(), arguments)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["measured"]["idle_us"] == 2.0
    assert [track.title.partition(",")[0] for track in read_timeline(out)] == ["planned", "measured: trace.json"]
    assert ElementTree.fromstring(svg.read_text()).tag.endswith("svg")
    missing = CliRunner().invoke(make_app(), ["timeline", str(tmp_path)])
    assert missing.exit_code == 2 and "schedule.json" in missing.output


def test_kernels_that_move_bytes_at_once_share_the_device() -> None:
    """Two large kernels side by side take as long as one after the other; a small one beside a large one does not."""
    graph = Graph()
    with FakeTensorMode() as mode:
        x = graph.placeholder("x")
        x.meta["val"] = mode.from_tensor(torch.empty(2**24, device="meta"))
        y = graph.placeholder("y")
        y.meta["val"] = mode.from_tensor(torch.empty(8, device="meta"))
    for target, argument, stream in ((ATEN.sin.default, x, 0), (ATEN.cos.default, x, 1), (ATEN.exp.default, y, 2)):
        node = graph.call_function(target, (argument,))
        infer(node)
        node.meta["stream"] = stream
    graph.output(())
    slots = {slot.node.name.partition("_")[0]: slot for slot in planned_slots(graph, DEVICE)}
    busy = slots["sin"].duration.busy * 1e6
    assert busy > 20
    assert slots["sin"].end == pytest.approx(LAUNCH + 2 * busy, rel=1e-3) == slots["cos"].end
    assert slots["exp"].end == pytest.approx(LAUNCH, abs=0.05)
    assert slots["sin"].beside is slots["cos"].node and slots["exp"].beside is None
