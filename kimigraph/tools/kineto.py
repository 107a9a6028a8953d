"""Kernels of a torch profiler trace (kineto's Chrome JSON): when each ran, in which replay, and what started it."""

import json
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from kimigraph.ir.errors import UsageError

_ON_DEVICE = ("kernel", "gpu_memset", "gpu_memcpy")
_CALLS = ("cuda_runtime", "cuda_driver")


@dataclass(frozen=True)
class DeviceEvent:
    """One kernel, memset or copy on the device: microseconds on the trace's clock, the device's stream.

    ``order`` is the node of the CUDA graph that it was (nodes count up as they were captured), 0 where the trace has
    none; ``call`` connects it with the call that started it.
    """

    name: str
    stream: int
    start: float
    length: float
    order: int = 0
    call: int = -1

    @property
    def end(self) -> float:
        """When it is over."""
        return self.start + self.length


def read_trace(path: Path) -> list[dict[str, Any]]:
    """The events of a trace file; UsageError when it is none."""
    try:
        document: Any = json.loads(path.read_text(encoding="utf-8"))
        return cast("list[dict[str, Any]]", document["traceEvents"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{path} is no trace of torch.profiler ({type(error).__name__}): write one with export_chrome_trace"
        ) from None


def device_events(events: Iterable[dict[str, Any]]) -> list[DeviceEvent]:
    """What ran on the device, by begin."""
    found = [_device_event(event) for event in events if event.get("cat") in _ON_DEVICE and event.get("ph") == "X"]
    return sorted(found, key=lambda event: (event.start, event.order))


def split_replays(events: Sequence[DeviceEvent], count: int) -> list[list[DeviceEvent]]:
    """The events of each of ``count`` replays of one graph, one after the other.

    Raises UsageError when they are not equally many or not the same kernels in each.
    """
    size, rest = divmod(len(events), max(count, 1))
    runs = [list(events[number * size : (number + 1) * size]) for number in range(count)]
    kinds = [Counter(event.name for event in run) for run in runs]
    if not size or rest or any(kind != kinds[0] for kind in kinds):
        raise UsageError(
            f"the trace has {len(events)} events on the device, which are no {count} replays of one graph: trace "
            "replays alone, after a warm-up, and give their number"
        )
    return runs


def median_replay(runs: Sequence[list[DeviceEvent]]) -> list[DeviceEvent]:
    """The replay of median length, from its first begin to its last end."""
    spans = [max(event.end for event in run) - run[0].start for run in runs]
    middle = statistics.median_low(spans)
    return runs[spans.index(middle)]


def annotated_events(events: Sequence[dict[str, Any]], prefix: str) -> list[tuple[str, str]]:
    """What each annotation called ``prefix...`` started on the device, in the order of the calls: (rest, kernel)."""
    ranges = sorted(
        (float(event["ts"]), float(event["ts"]) + float(event["dur"]), str(event["name"]).removeprefix(prefix))
        for event in events
        if event.get("ph") == "X" and event.get("cat") == "user_annotation" and str(event["name"]).startswith(prefix)
    )
    calls = {
        int(event["args"]["correlation"]): float(event["ts"])
        for event in events
        if event.get("cat") in _CALLS and "correlation" in event.get("args", {})
    }
    found: list[tuple[float, str, str]] = []
    for event in device_events(events):
        time = calls.get(event.call, event.start)
        name = next((name for begin, end, name in ranges if begin <= time <= end), "")
        found.append((time, name, event.name))
    return [(name, kernel) for _, name, kernel in sorted(found, key=lambda item: item[0])]


def name_events(events: Sequence[DeviceEvent], known: Sequence[tuple[str, str]]) -> list[str]:
    """For each event the node that started it; ``known`` has (node, kernel) in the order of the program.

    That order is looked for by graph node, then by begin. Where neither has the same kernels, as others run inside a
    capture than outside, each event takes the first node left with its kernel; the name stays empty where none is.
    """
    kernels = [kernel for _, kernel in known]
    begun = sorted(range(len(events)), key=lambda index: events[index].start)
    for places in (sorted(begun, key=lambda index: events[index].order), begun):
        if [events[index].name for index in places] == kernels:
            found = {index: node for index, (node, _) in zip(places, known, strict=True)}
            return [found[index] for index in range(len(events))]
    left, names = list(known), [""] * len(events)
    for index in begun:
        place = next((place for place, (_, kernel) in enumerate(left) if kernel == events[index].name), None)
        if place is not None:
            names[index] = left.pop(place)[0]
    return names


def _device_event(event: dict[str, Any]) -> DeviceEvent:
    facts: dict[str, Any] = event.get("args", {})
    return DeviceEvent(
        str(event["name"]),
        int(facts.get("stream", event.get("tid", 0))),
        float(event["ts"]),
        float(event["dur"]),
        int(facts.get("graph node id", 0)),
        int(facts.get("correlation", -1)),
    )
