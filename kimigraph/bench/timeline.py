"""Time on the device alone, for a call that no CUDA graph can hold because its host part decides what to launch."""

import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from kimigraph.bench.protocol import Timing

ROUNDS = 5


def time_on_device(call: Callable[[], Any], at_least: int, rounds: int = ROUNDS) -> Timing:
    """Microseconds of all kernels of ``call`` together, without the gaps between them; it has run before."""
    torch.cuda.synchronize()
    times = [_kernels(call, at_least) for _ in range(rounds)]
    return Timing(statistics.median(times), min(times), max(times), tuple(times))


def _kernels(call: Callable[[], Any], count: int) -> float:
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        for _ in range(count):
            call()
        torch.cuda.synchronize()
    return sum(entry.self_device_time_total for entry in trace.key_averages()) / count
