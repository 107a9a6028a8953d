"""The one interface between the pass manager and whatever watches it."""

from kimigraph.ir.program import CapturedProgram
from kimigraph.ir.remarks import PassResult
from kimigraph.passes.base import Pass
from kimigraph.passes.pipeline import Pipeline


class Instrument:
    """Called by ``run_pipeline`` at each event; every method may be left out. ``index`` counts passes from 1.

    An instrument looks and does not touch: the program belongs to the passes. An exception raised by one ends the run.
    """

    def before_pipeline(self, program: CapturedProgram, pipeline: Pipeline) -> None:
        """The program as captured, before the first pass."""

    def after_pass(self, index: int, item: Pass, program: CapturedProgram, result: PassResult, seconds: float) -> None:
        """A pass has run; ``seconds`` is the time of the pass alone."""

    def pass_failed(self, index: int, item: Pass, program: CapturedProgram, error: Exception) -> None:
        """A pass raised, or left a program that an instrument refused. The graph is as the failure left it."""

    def after_pipeline(self, program: CapturedProgram) -> None:
        """All passes have run."""
