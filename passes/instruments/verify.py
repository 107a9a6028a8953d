"""The verifier after every pass."""

from kimigraph.ir.errors import CompileError
from kimigraph.ir.program import CapturedProgram
from kimigraph.ir.remarks import PassResult
from kimigraph.ir.verifier import verify
from kimigraph.passes.base import Pass
from kimigraph.passes.instruments.base import Instrument
from kimigraph.passes.pipeline import Pipeline


class VerifyPasses(Instrument):
    """Refuses a program that breaks the rules of the language, and says which pass broke it."""

    def before_pipeline(self, program: CapturedProgram, pipeline: Pipeline) -> None:
        """Verify the capture."""
        verify(program)

    def after_pass(self, index: int, item: Pass, program: CapturedProgram, result: PassResult, seconds: float) -> None:
        """Verify what a pass changed. CompileError names pass and fault."""
        if not result.modified:
            return
        try:
            verify(program)
        except CompileError as error:
            raise CompileError(
                f"pass {index} '{item.name}' left a graph that does not verify: {error} "
                f"This is a fault of the pass; --disable-pass {item.name} compiles without it."
            ) from error
