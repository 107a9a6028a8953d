"""``kimigraph explain --node X``: when X runs in the planned schedule, and what it waits for."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kimigraph.ir.trace import BUBBLE, FILE, Span, Track, read_timeline
from kimigraph.tools.publish import DOCUMENT_NAME, REMARKS_NAME

_SCHEDULERS = ("split-indexer-prolog", "assign-streams")
"""Passes whose remarks name nodes that stay."""


@dataclass(frozen=True)
class Wait:
    """One node that another waits for: why, and what keeps the order."""

    node: str
    stream: int
    why: str
    kept_by: str

    def describe(self) -> str:
        """For people."""
        return f"{self.node} (stream {self.stream}): {self.why}, kept by {self.kept_by}"


@dataclass(frozen=True)
class Waiting:
    """A node in the planned schedule; times in microseconds from its begin.

    ``node`` is the kernel that the node asked for became, ``behind`` the node whose end lets it begin, ``idle`` how
    long its stream has nothing to do before it. ``beside`` is a node on another stream that it had to share the device
    with.
    """

    node: str
    stream: int
    start: float
    end: float
    length: float
    behind: str
    idle: float
    beside: str
    waits: tuple[Wait, ...]

    def as_dict(self) -> dict[str, Any]:
        """As plain JSON values."""
        return asdict(self)

    def describe(self) -> list[tuple[str, str]]:
        """Rows for people."""
        rows = [
            ("planned", f"{self.start:.2f} to {self.end:.2f} us of {self.length:.2f} us, on stream {self.stream}"),
            ("begins", f"when {self.behind} is done" if self.behind else "with the step: it waits for nothing"),
        ]
        if self.idle:
            rows.append(("idle before", f"{self.idle:.2f} us on stream {self.stream}"))
        if self.beside:
            rows.append(("slowed by", f"{self.beside}, which has its share of the device at that time"))
        return rows + [("waits for", wait.describe()) for wait in self.waits]


def waiting(directory: Path, node: str) -> Waiting | None:
    """Where ``node``, or the kernel that it became a part of, stands in the schedule; None when it starts no kernel.

    None, too, where the directory has no schedule: an artifact without a report, or dumps of an older version.
    """
    if not (directory / FILE).is_file():
        return None
    track = read_timeline(directory / FILE)[0]
    spans = {span.name: span for span in track.kernels}
    span = spans.get(node) or next((spans[name] for name in _kernels_of(directory, node) if name in spans), None)
    return None if span is None else _waiting(track, span)


def _waiting(track: Track, span: Span) -> Waiting:
    streams = {other.name: other.lane for other in track.kernels}
    idle = [other.length for other in track.spans if other.kind == BUBBLE and other.facts.get("node") == span.name]
    waits = [
        Wait(
            item["for"],
            streams.get(item["for"], 0),
            f"{item['why']} in the storage of {item['storage']}" if "storage" in item else item["why"],
            item["kept by"],
        )
        for item in span.facts.get("waits", ())
    ]
    return Waiting(
        span.name,
        span.lane,
        span.start,
        span.end,
        track.length,
        str(span.facts.get("behind", "")),
        round(sum(idle), 3),
        str(span.facts.get("beside", "")),
        tuple(waits),
    )


def _kernels_of(directory: Path, node: str) -> set[str]:
    """What the node became: by the remarks of the passes that replace nodes, one after the other, and the kernels."""
    became = {node}
    for remark in _lines(directory / REMARKS_NAME):
        if remark["kind"] == "passed" and remark["pass_name"] not in _SCHEDULERS and became & {*remark["nodes"]}:
            became.add(str(remark["node"]))
    path = directory / DOCUMENT_NAME
    kernels: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["kernels"] if path.is_file() else []
    return became | {str(kernel["name"]) for kernel in kernels if became & {*kernel.get("replaces", ())}}


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.is_file() else []
