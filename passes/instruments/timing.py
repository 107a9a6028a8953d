"""Seconds per pass."""

from dataclasses import dataclass, field

from kimigraph.ir.program import CapturedProgram
from kimigraph.ir.remarks import PassResult
from kimigraph.passes.base import Pass
from kimigraph.passes.instruments.base import Instrument
from kimigraph.passes.options import print_pass


@dataclass
class TimePasses(Instrument):
    """Collects ``(pass text, seconds)`` in the order in which the passes ran."""

    seconds: list[tuple[str, float]] = field(default_factory=lambda: [])

    def after_pass(self, index: int, item: Pass, program: CapturedProgram, result: PassResult, seconds: float) -> None:
        """Note the time of the pass."""
        self.seconds.append((print_pass(item), seconds))

    @property
    def total(self) -> float:
        """Seconds of all passes together."""
        return sum(seconds for _, seconds in self.seconds)
