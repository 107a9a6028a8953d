"""Random delays between what a program's streams run, drawn anew for every replay of its graph.

What no event orders then comes in another order each time: a missing wait, or memory that is used again too early,
shows as other bits.
"""

from typing import Any

import torch

from kimigraph.adapters.stream_delay import hold_stream
from kimigraph.runtime.executor import Executor

MOST = 4096
"""Delays in one step; a step with more uses some of them twice."""


class Delays:
    """Delays of up to ``longest`` nanoseconds, most of them short, in every step that an executor runs from now on.

    One stands before each block of a stream, and on both sides of what it waits for and of each event that it records.
    A captured step keeps its delays, whose lengths ``draw`` changes.
    """

    def __init__(self, executor: Executor, longest: int = 20_000) -> None:
        self.durations = torch.zeros(MOST, dtype=torch.int64, device="cuda")
        self.longest, self.count = longest, 0
        step: Any = executor.step
        self._inject(step.__wrapped__.__globals__["streams"].Lanes)

    def draw(self) -> None:
        """Other lengths, on the device and in the order of the current stream."""
        self.durations.copy_(torch.rand(MOST, device="cuda").pow_(4).mul_(self.longest))

    def hold(self) -> None:
        """A delay on the current stream."""
        hold_stream(self.durations, self.count % MOST)
        self.count += 1

    def _inject(self, lanes: Any) -> None:
        enter, wait, record = lanes.__getitem__, lanes.wait, lanes.record

        def delayed_enter(held: Any, number: int) -> Any:
            if held.streams:  # outside a capture all lanes are the caller's stream
                with torch.cuda.stream(held.streams[number]):
                    self.hold()
            return enter(held, number)

        def delayed_wait(held: Any, *names: str) -> None:
            self.hold()
            wait(held, *names)
            self.hold()

        def delayed_record(held: Any, name: str) -> None:
            self.hold()
            record(held, name)
            self.hold()

        lanes.__getitem__, lanes.wait, lanes.record = delayed_enter, delayed_wait, delayed_record
