"""Streams of one step: some branches of a program run beside others, ordered by events.

An artifact whose program has several streams carries this file's text as ``support/streams.py``, so it imports torch
and the standard library alone. Stream 0 is the caller's. The others begin behind what the caller has queued, and
``join`` makes the caller's stream wait for them; so it works inside the capture of a CUDA graph, too. On a CPU
everything runs in the order of the program.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

_SIDES: dict[tuple[int, int], list[Any]] = {}
"""Side streams by device and caller's stream: memory that a step gives back is taken again behind the same caller."""


def fork(device: torch.device, count: int) -> "Lanes":
    """``count`` lanes of one step; lane 0 is the current stream.

    Branches pay inside a CUDA graph. Outside a capture each launch costs the host more than a branch could hide, so
    everything is queued on the current stream, in the order of the program.
    """
    return Lanes(_streams(count) if device.type == "cuda" and torch.cuda.is_current_stream_capturing() else [])


def _streams(count: int) -> list[Any]:
    caller = torch.cuda.current_stream()
    sides = _SIDES.setdefault((caller.device_index, caller.cuda_stream), [])
    while len(sides) < count - 1:
        sides.append(torch.cuda.Stream())
    for side in sides[: count - 1]:
        side.wait_stream(caller)
    return [caller, *sides[: count - 1]]


class Lanes:
    """The streams of one step and its events, by the variable that each follows."""

    def __init__(self, streams: list[Any]) -> None:
        self.streams = streams
        self.events: dict[str, Any] = {}

    def __getitem__(self, number: int) -> AbstractContextManager[Any]:
        """What is queued inside ``with lanes[number]:`` goes to that stream."""
        return torch.cuda.stream(self.streams[number]) if self.streams else nullcontext()

    def record(self, name: str) -> None:
        """The current stream has computed ``name`` once it has come here."""
        if self.streams:
            self.events[name] = torch.cuda.current_stream().record_event()

    def wait(self, *names: str) -> None:
        """The current stream goes on when ``names`` are computed."""
        if self.streams:
            for name in names:
                torch.cuda.current_stream().wait_event(self.events[name])

    def join(self) -> None:
        """The caller's stream goes on when all have come to an end; only then may the step's memory be freed."""
        for side in self.streams[1:]:
            self.streams[0].wait_stream(side)
