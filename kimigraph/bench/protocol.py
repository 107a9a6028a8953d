"""How a time is taken: calls inside one CUDA graph, inputs rotated through more memory than the L2 cache holds."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kimigraph.ir.errors import UsageError

COLD_BYTES = 240 * 2**20  # four times the L2 cache of an H200
REPLAYS = 11
CALLS = 20

Call = Callable[[], Any]


@dataclass(frozen=True)
class Timing:
    """Microseconds a call over the replays, each of them in ``samples``."""

    median: float
    least: float
    most: float
    samples: tuple[float, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """For JSON, to a nanosecond."""
        numbers = {"median": self.median, "least": self.least, "most": self.most}
        rounded: dict[str, Any] = {name: round(value, 3) for name, value in numbers.items()}
        return rounded | {"samples": [round(value, 3) for value in self.samples]}


def require_gpu() -> None:
    """UsageError where there is nothing to time on."""
    if not torch.cuda.is_available():
        raise UsageError("kimigraph bench needs an NVIDIA GPU, and torch sees none here")


def sets_for_cold_cache(nbytes: int, most: int = 256) -> int:
    """How many input sets of ``nbytes`` each make every call find its inputs outside the L2 cache."""
    return max(2, min(most, COLD_BYTES // max(nbytes, 1) + 1))


def time_in_graph(calls: Sequence[Call], at_least: int = CALLS, replays: int = REPLAYS) -> Timing:
    """Time ``calls``, one an input set, in turn: one graph of ``at_least`` calls, replayed; events around a replay."""
    return times_in_turn({"": calls}, at_least, replays)[""]


def times_in_turn(
    named: Mapping[str, Sequence[Call]], at_least: int = CALLS, replays: int = REPLAYS
) -> dict[str, Timing]:
    """The same for several that are compared: their replays take turns, so that the device's clock is alike for all."""
    captured = {name: _captured(calls, max(at_least, len(calls))) for name, calls in named.items()}
    times: dict[str, list[float]] = {name: [] for name in named}
    for _ in range(replays):
        for name, graph in captured.items():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times[name].append(start.elapsed_time(end) * 1e3 / max(at_least, len(named[name])))
    return {name: Timing(statistics.median(all_), min(all_), max(all_), tuple(all_)) for name, all_ in times.items()}


def _captured(calls: Sequence[Call], count: int) -> torch.cuda.CUDAGraph:
    """A graph of ``count`` calls, replayed once."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        calls[0]()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for number in range(count):
            calls[number % len(calls)]()
    graph.replay()
    return graph


def ceilings() -> dict[str, float]:
    """What the device gives at most: copy rate (bytes read and written), and the cost of an empty graph node."""
    source = torch.empty(2**30, dtype=torch.int16, device="cuda").random_()
    target = torch.empty_like(source)
    # A kernel: a copy would become a node for the copy engines, which are slower.
    copy = time_in_graph([lambda: torch.neg(source, out=target)], at_least=10, replays=9)
    tiny = torch.empty(1, device="cuda")
    node = time_in_graph([lambda: tiny.zero_()], at_least=100, replays=5)
    return {"copy_tb_per_s": round(4 * source.numel() / copy.median / 1e6, 3), "node_us": round(node.median, 3)}


def relative_error(value: torch.Tensor, wanted: torch.Tensor) -> float:
    """The norm of the difference over the norm of ``wanted``."""
    return float((value.double() - wanted.double()).norm() / wanted.double().norm().clamp_min(1e-300))
