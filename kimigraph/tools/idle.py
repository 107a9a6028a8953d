"""How long a GPU does nothing inside one replay of a step, and before which kernels."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kimigraph.tools.kineto import DeviceEvent

ALLOWED_US = 1.0
"""What a kernel that waits for another costs in any case: about the time of an empty node of a CUDA graph."""


@dataclass(frozen=True)
class Gap:
    """The device did nothing for ``length`` microseconds from ``start`` on, until event number ``before`` began."""

    start: float
    length: float
    before: int


@dataclass(frozen=True)
class Idle:
    """Idle time of one replay, in microseconds.

    ``span`` is from the first begin to the last end, ``busy`` the time in which at least one kernel ran, ``beyond`` the
    part of the gaps that is longer than ``ALLOWED_US`` each.
    """

    span: float
    busy: float
    gaps: tuple[Gap, ...]

    @property
    def total(self) -> float:
        """All gaps together."""
        return self.span - self.busy

    @property
    def beyond(self) -> float:
        """What the gaps have beyond what a dependent kernel costs in any case."""
        return sum(max(gap.length - ALLOWED_US, 0.0) for gap in self.gaps)

    def as_dict(self) -> dict[str, Any]:
        """For JSON, shares of the span included."""
        return {
            "span_us": round(self.span, 3),
            "busy_us": round(self.busy, 3),
            "idle_us": round(self.total, 3),
            "idle_share": round(self.total / self.span, 4) if self.span else 0.0,
            "beyond_us": round(self.beyond, 3),
            "beyond_share": round(self.beyond / self.span, 4) if self.span else 0.0,
            "gaps": len(self.gaps),
        }


def idle_of(events: Sequence[DeviceEvent]) -> Idle:
    """The gaps between the events of one replay, which are in order of their begin; overlaps count once."""
    gaps: list[Gap] = []
    busy, until = 0.0, events[0].start if events else 0.0
    for number, event in enumerate(events):
        if event.start > until:
            gaps.append(Gap(until, event.start - until, number))
        busy += max(event.end - max(event.start, until), 0.0)
        until = max(until, event.end)
    return Idle(until - events[0].start if events else 0.0, busy, tuple(gaps))
