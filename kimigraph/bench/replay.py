"""One replay of a step under torch's profiler, and which line of ``program.py`` each kernel comes from."""

import ast
import sys
import tempfile
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from kimigraph.ir.manifest import Manifest
from kimigraph.tools.kineto import (
    DeviceEvent,
    annotated_events,
    device_events,
    median_replay,
    name_events,
    read_trace,
    split_replays,
)

PREFIX = "kimigraph node "
REPLAYS, WARM = 9, 3


def captured(call: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    """``call`` as a CUDA graph that has been replayed once."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    graph.replay()
    torch.cuda.synchronize()
    return graph


def traced_replay(graph: torch.cuda.CUDAGraph) -> list[DeviceEvent]:
    """What one replay puts on the device: the one of median length of ``REPLAYS``.

    Between two replays the whole L2 cache is overwritten, so that each begins with a cold one.
    """
    filler = torch.empty(4 * torch.cuda.get_device_properties().L2_cache_size, dtype=torch.uint8, device="cuda")

    def replays() -> None:
        for _ in range(WARM + REPLAYS):
            filler.fill_(1)
            torch.cuda.synchronize()
            graph.replay()
            torch.cuda.synchronize()

    runs = split_replays(device_events(_trace(replays)), WARM + REPLAYS)
    return median_replay([run[1:] for run in runs[WARM:]])


def launches_by_node(directory: Path, step: Callable[[], Any]) -> list[tuple[str, str]]:
    """The kernels that ``step``, a call of the artifact in ``directory``, starts: (node, kernel), in program order.

    The step runs outside a capture, each statement of ``program.py`` under an annotation of its own.
    """
    path = directory / "program.py"
    labels = statement_nodes(path.read_text(encoding="utf-8"), Manifest.read(directory))

    def annotated() -> None:
        with annotating(path, labels, torch.cuda.synchronize):
            step()
        torch.cuda.synchronize()

    step()
    return annotated_events(_trace(annotated), PREFIX)


def named_replay(directory: Path, step: Callable[[], Any]) -> tuple[list[DeviceEvent], list[str], torch.cuda.CUDAGraph]:
    """A replay of the artifact's step as a CUDA graph, the node of each of its events, and the graph."""
    known = launches_by_node(directory, step)
    graph = captured(step)
    replay = traced_replay(graph)
    return replay, name_events(replay, known), graph


def statement_nodes(program: str, manifest: Manifest) -> dict[int, str]:
    """The node that each line of the step's body belongs to: what it assigns, or whose kernel it calls."""
    nodes: dict[str, list[str]] = {}
    for kernel in manifest.kernels:
        nodes.setdefault(Path(kernel.file).stem, []).append(kernel.name)
    tree = ast.parse(program)
    step = next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "step")
    labels: dict[int, str] = {}
    for statement in _simple_statements(step.body):
        called = _called(statement)
        kernel = called.removeprefix("kernels.").partition("_on_")[0] if called.startswith("kernels.") else ""
        name = nodes[kernel].pop(0) if nodes.get(kernel) else _assigned(statement) or called
        for line in range(statement.lineno, (statement.end_lineno or statement.lineno) + 1) if name else ():
            labels[line] = name
    return labels


def _simple_statements(body: list[ast.stmt]) -> Generator[ast.stmt]:
    for statement in body:
        if isinstance(statement, ast.With):
            yield from _simple_statements(statement.body)
        else:
            yield statement


def _assigned(statement: ast.stmt) -> str:
    target = statement.targets[0] if isinstance(statement, ast.Assign) else None
    return target.id if isinstance(target, ast.Name) else ""


def _called(statement: ast.stmt) -> str:
    value = statement.value if isinstance(statement, ast.Assign | ast.Expr) else None
    return ast.unparse(value.func) if isinstance(value, ast.Call) else ""


@contextmanager
def annotating(path: Path, labels: Mapping[int, str], settle: Callable[[], None] | None = None) -> Generator[None]:
    """Put every statement of the step of ``path`` under a profiler annotation with its node's name.

    ``settle`` is called before one ends: what it waits for began and ended inside.
    """
    opened: list[Any] = []

    def close() -> None:
        if opened and settle is not None:
            settle()
        while opened:
            opened.pop().__exit__(None, None, None)

    def on_line(frame: FrameType, event: str, argument: Any) -> Any:
        if event in ("line", "return"):
            close()
        if event == "line" and frame.f_lineno in labels:
            opened.append(record_function(PREFIX + labels[frame.f_lineno]))
            opened[-1].__enter__()
        return on_line

    def on_call(frame: FrameType, event: str, argument: Any) -> Any:
        code = frame.f_code
        return on_line if code.co_name == "step" and code.co_filename == str(path) else None

    before = sys.gettrace()
    sys.settrace(on_call)
    try:
        yield
    finally:
        sys.settrace(before)
        close()


def _trace(call: Callable[[], None]) -> list[dict[str, Any]]:
    """The events of a call under the profiler, which has been started once before."""
    torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "trace.json"
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            call()
            torch.cuda.synchronize()
        profiler.export_chrome_trace(str(path))
        return read_trace(path)
