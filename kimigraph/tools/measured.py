"""A measured replay as a timeline beside the planned one: the same names, and what each gap waits for."""

from collections.abc import Mapping, Sequence

from kimigraph.ir.trace import BUBBLE, Span, Track
from kimigraph.tools.idle import Idle, idle_of
from kimigraph.tools.kineto import DeviceEvent

LEAST_BUBBLE = 0.05
"""Microseconds: shorter gaps get no name."""
_DEVICE_LANE = 1000


def measured_track(
    replay: Sequence[DeviceEvent], names: Sequence[str], planned: Track | None, title: str = "measured: one replay"
) -> Track:
    """The events of one replay, in order of their begin, named after the nodes that they belong to.

    A lane for each stream of the device (a kernel that starts before its predecessor ends goes to a lane below), and
    one on which the times are named in which nothing runs at all. ``planned`` says what a node waits for.
    """
    origin = replay[0].start if replay else 0.0
    behind = {} if planned is None else {span.name: str(span.facts.get("behind", "")) for span in planned.kernels}
    lanes = _Lanes()
    spans: list[Span] = []
    for event, name in zip(replay, names, strict=True):
        lane, free = lanes.take(event)
        node = name or event.name
        start = event.start - origin
        if free is not None and event.start - free > LEAST_BUBBLE:
            facts = {"node": node}
            spans.append(Span(_waits(node, behind), lane, free - origin, event.start - free, BUBBLE, facts))
        facts = {"node": node, "kernel": event.name, "stream": event.stream}
        spans.append(Span(node, lane, start, event.length, facts=facts))
    idle = idle_of(replay)
    spans += _device_gaps(idle, names, behind, origin)
    titles = {**lanes.titles, _DEVICE_LANE: "nothing runs"}
    return Track(title, titles, tuple(spans), facts=idle.as_dict())


def _device_gaps(idle: Idle, names: Sequence[str], behind: Mapping[str, str], origin: float) -> list[Span]:
    return [
        Span(_waits(names[gap.before], behind), _DEVICE_LANE, gap.start - origin, gap.length, BUBBLE)
        for gap in idle.gaps
        if gap.length > LEAST_BUBBLE
    ]


def _waits(node: str, behind: Mapping[str, str]) -> str:
    waited = behind.get(node, "")
    return f"{node} waits for {waited}" if waited else f"before {node}"


class _Lanes:
    """Which lane an event goes to: its stream's, or one below it while another event of the stream still runs."""

    def __init__(self) -> None:
        self.titles: dict[int, str] = {}
        self._free: dict[int, float] = {}
        self._first: dict[int, int] = {}

    def take(self, event: DeviceEvent) -> tuple[int, float | None]:
        """The lane, and until when it was taken (None: never)."""
        lane = self._first.setdefault(event.stream, 10 * len(self._first))
        below = 0
        while self._free.get(lane + below, event.start) > event.start + 1e-3:
            below += 1
        lane += below
        self.titles.setdefault(lane, f"stream {event.stream} of the device" + (", overlapping" if below else ""))
        free = self._free.get(lane)
        self._free[lane] = event.end
        return lane, free
