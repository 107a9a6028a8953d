"""Timelines as Perfetto and ``chrome://tracing`` read them: spans on lanes of processes, arrows between spans.

A timeline of kimigraph is one JSON document. Its spans have ``cat`` ``kernel`` (a node of the program at work) or
``bubble`` (a lane that has nothing to do, named after what it waits for); times are microseconds.
"""

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from kimigraph.ir.errors import UsageError

SCHEMA = 2
FIRST_SCHEMA = 1
"""Lanes were the numbers of threads then. It is still read."""
FILE = "schedule.json"
KERNEL, BUBBLE = "kernel", "bubble"


def _no_arguments() -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class Span:
    """Something that takes time on a lane: microseconds from the begin of the timeline, and what is known of it."""

    name: str
    lane: int
    start: float
    length: float
    kind: str = KERNEL
    facts: dict[str, Any] = field(default_factory=_no_arguments)

    @property
    def end(self) -> float:
        """When it is over."""
        return self.start + self.length


@dataclass(frozen=True)
class Track:
    """One process of a timeline: a title, names of lanes, spans, and arrows from one span to another by index."""

    title: str
    lanes: dict[int, str]
    spans: tuple[Span, ...]
    arrows: tuple[tuple[int, int], ...] = ()
    facts: dict[str, Any] = field(default_factory=_no_arguments)

    @property
    def kernels(self) -> list[Span]:
        """The spans at work, in order of their begin."""
        return sorted((span for span in self.spans if span.kind == KERNEL), key=lambda span: span.start)

    @property
    def length(self) -> float:
        """From the first begin to the last end."""
        kernels = self.kernels
        return max((span.end for span in kernels), default=0.0) - (kernels[0].start if kernels else 0.0)

    def without(self, fact: str) -> "Track":
        """The same, its spans without one of their facts: source lines name files of the machine that compiled."""
        spans = [
            replace(span, facts={key: value for key, value in span.facts.items() if key != fact}) for span in self.spans
        ]
        return replace(self, spans=tuple(spans))


def timeline(tracks: list[Track]) -> dict[str, Any]:
    """The JSON document of some tracks, one process each."""
    events: list[dict[str, Any]] = []
    arrows = 0
    for pid, track in enumerate(tracks, 1):
        events.append(_meta("process_name", pid, 0, track.title))
        for lane, name in sorted(track.lanes.items()):
            events += [_meta("thread_name", pid, lane, name), _sorted(pid, lane)]
        events += [_span(pid, span) for span in track.spans]
        for first, second in track.arrows:
            arrows += 1
            events += _arrow(pid, arrows, track.spans[first], track.spans[second])
    facts = [{"title": track.title, "arrows": track.arrows, **track.facts} for track in tracks]
    return {"traceEvents": events, "displayTimeUnit": "ns", "otherData": {"schema": SCHEMA, "tracks": facts}}


def write_timeline(path: Path, tracks: list[Track]) -> None:
    """Write the document of some tracks."""
    path.write_text(timeline_text(tracks), encoding="utf-8")


def timeline_text(tracks: list[Track]) -> str:
    """The same as text, an event a line."""
    document = timeline(tracks)
    events = ",\n".join(json.dumps(event) for event in document.pop("traceEvents"))
    return f'{{"traceEvents": [\n{events}\n],\n{json.dumps(document)[1:-1]}}}\n'


def read_timeline(path: Path) -> list[Track]:
    """The tracks of a file that ``write_timeline`` wrote; UsageError when it is none."""
    try:
        document: Any = json.loads(path.read_text(encoding="utf-8"))
        schema = document["otherData"]["schema"]
        if schema not in (FIRST_SCHEMA, SCHEMA):
            raise ValueError(f"its schema is not {SCHEMA}")
        told: list[dict[str, Any]] = document["otherData"]["tracks"]
        events = cast("list[dict[str, Any]]", document["traceEvents"])
        firsts = [_thread(number, 0) if schema == SCHEMA else 0 for number in range(1, len(told) + 1)]
        return [_track(number, firsts[number - 1], dict(facts), events) for number, facts in enumerate(told, 1)]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{path} is no timeline of kimigraph ({type(error).__name__}: {error}): `kimigraph compile` writes one as "
            f"{FILE} beside the program and with --dump-passes"
        ) from None


def _track(pid: int, first: int, facts: dict[str, Any], events: list[dict[str, Any]]) -> Track:
    own = [event for event in events if event["pid"] == pid]
    lanes = {event["tid"] - first: event["args"]["name"] for event in own if event["name"] == "thread_name"}
    spans = [
        Span(event["name"], event["tid"] - first, event["ts"], event["dur"], event["cat"], event["args"])
        for event in own
        if event["ph"] == "X"
    ]
    arrows = tuple((first, second) for first, second in facts.pop("arrows"))
    return Track(facts.pop("title"), lanes, tuple(spans), arrows, facts)


def _thread(pid: int, lane: int) -> int:
    """The thread that a lane is: Perfetto takes thread 0, and the one of its process' number, for the same thread."""
    return 1000 * pid + lane


def _meta(name: str, pid: int, lane: int, text: str) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": pid, "tid": _thread(pid, lane), "args": {"name": text}}


def _sorted(pid: int, lane: int) -> dict[str, Any]:
    event = _meta("thread_sort_index", pid, lane, "")
    return {**event, "args": {"sort_index": lane}}


def _span(pid: int, span: Span) -> dict[str, Any]:
    # Perfetto counts whole nanoseconds, and drops a span that begins before the one before it on its lane has ended.
    start, end = round(span.start, 3), round(span.end, 3)
    times = {"ts": start, "dur": round(end - start, 3)}
    color = {"cname": "grey"} if span.kind == BUBBLE else {}
    return {
        "ph": "X",
        "name": span.name,
        "cat": span.kind,
        "pid": pid,
        "tid": _thread(pid, span.lane),
        **times,
        **color,
        "args": span.facts,
    }


def _arrow(pid: int, number: int, first: Span, second: Span) -> list[dict[str, Any]]:
    common = {"name": "wait", "cat": "wait", "id": number, "pid": pid}
    return [
        {"ph": "s", **common, "tid": _thread(pid, first.lane), "ts": round(max(first.start, first.end - 0.001), 3)},
        {"ph": "f", "bp": "e", **common, "tid": _thread(pid, second.lane), "ts": round(second.start + 0.001, 3)},
    ]
