"""What a captured step runs, kernel by kernel, and for how long: the profile of one replay of its CUDA graph."""

from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile


def graph_trace(call: Callable[[], Any], replays: int = 3) -> list[tuple[str, float]]:
    """Names and microseconds of what the last of ``replays`` replays of ``call`` ran on the device, in order of start.

    ``call`` has run before: no warm-up happens here. The profiler adds to gaps between kernels, not to their times.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    graph.replay()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(replays):
            graph.replay()
        torch.cuda.synchronize()
    found: list[Any] = [event for event in profiler.events() or [] if event.device_type.name == "CUDA"]
    found.sort(key=lambda event: event.time_range.start)
    last = found[len(found) - len(found) // replays :]
    return [(str(event.name), round(float(event.time_range.elapsed_us()), 2)) for event in last]
