"""Whether a step runs as two interleaved half-batches: as asked for, or where the cost model says that it pays."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from kimigraph.ir.config import CompileConfig
from kimigraph.ir.device import device_for
from kimigraph.ir.errors import KimigraphError, UsageError
from kimigraph.ir.program import CapturedProgram
from kimigraph.ir.remarks import Remark
from kimigraph.passes import Pipeline
from kimigraph.passes.assign_streams import PLANNED
from kimigraph.passes.manager import PassRecord
from kimigraph.passes.scheduling.halves import LEAST_SHARE, bound_of

PASS = "interleave-halves"

Run = Callable[[CapturedProgram, bool], list[PassRecord]]
"""Runs the pipeline over a program; with True, whatever watches the compilation watches."""


@dataclass(frozen=True)
class Halving:
    """The choice of one compilation. ``capture`` captures the step of half the batch of the program given."""

    config: CompileConfig
    pipeline: Pipeline
    capture: Callable[[CapturedProgram], CapturedProgram] | None

    def run(self, program: CapturedProgram, run: Run) -> tuple[CapturedProgram, list[PassRecord]]:
        """The program that is compiled, after the pipeline, and the records of its passes.

        Raises UsageError where half-batches are asked for and cannot be had.
        """
        hindrance = self._hindrance(program)
        if self.config.half_batches == "on":
            if hindrance:
                raise _refusal(hindrance)
            try:
                half = self._captured(program)
            except UsageError as error:
                raise _refusal(str(error)) from error
            return half, run(half, True)
        if self.config.half_batches == "off" or hindrance or not self._overlaps():
            return program, run(program, True)
        captured = replace(program, info=dict(program.info))  # what halving asks it about, not its graph
        records = run(program, True)
        if not bound_of(program, device_for(self.config)).may_pay:
            return program, records
        return self._compared(captured, program, records, run)

    def _compared(
        self, captured: CapturedProgram, program: CapturedProgram, records: list[PassRecord], run: Run
    ) -> tuple[CapturedProgram, list[PassRecord]]:
        """The shorter one as planned; the halves where they save as much as the bound asks for."""
        try:
            half = self._captured(captured)
            trial = half.copy()
            halves = _planned(run(trial, False))
        except KimigraphError as error:
            return program, _with_note(records, f"the step as it is: {error}")
        whole = _planned(records)
        told = f"planned as two half-batches {halves:.1f} us, as it is {whole:.1f} us"
        if halves >= LEAST_SHARE * whole:
            return program, _with_note(records, f"the step as it is: {told}")
        return half, _with_note(run(half, True), told)

    def _hindrance(self, program: CapturedProgram) -> str:
        """Why this step cannot be one of two halves; empty when it can."""
        config = self.config
        if config.mesh.size > 1 and (config.half_batches != "on" or config.pp > 1 or config.sp > 1):
            return "half-batches are for one rank, and where they are asked for, for ranks that share out heads (tp)"
        rows = {spec.shape[0] if spec.shape else 0 for spec in program.inputs if not spec.bound}
        if self.capture is None or PASS not in self.pipeline.names:
            return f"no step of half the batch is at hand, or {PASS} is not in the pipeline"
        phases = ("decode",) if config.tp == 1 else ("decode", "prefill")
        if config.phase not in phases or config.cache_layout != "model":
            return "half-batches are for decode, on several ranks also for prefill, over caches as the model has them"
        if config.state_log > 1:
            return "states are logged (state_log), which halves of a batch cannot"
        if config.check_numerics:
            return "--check-numerics compares passes on one form of the inputs"
        if any(spec.mutated and spec.bound for spec in program.inputs):
            return "the step updates a buffer of the model"
        [*_, output] = program.graph_module.graph.nodes
        rows |= {node.meta["val"].shape[0] if node.meta["val"].dim() else 0 for node in output.all_input_nodes}
        if len(rows) != 1 or min(rows) < 2 or min(rows) % 2:
            return f"inputs and results have {', '.join(map(str, sorted(rows)))} rows, not one even batch"
        return ""

    def _overlaps(self) -> bool:
        """Whether streams are there, and forked for their price."""
        config = self.config
        return config.streams > 1 and not config.force_streams and device_for(config).units > 1

    def _captured(self, program: CapturedProgram) -> CapturedProgram:
        assert self.capture is not None
        return self.capture(program)


def _refusal(reason: str) -> UsageError:
    return UsageError(f"--half-batches on: {reason}; --half-batches auto compiles the step as it is")


def _planned(records: list[PassRecord]) -> float:
    """Microseconds of the step as the forking pass placed it; none where no such pass ran."""
    found = [record.result.statistics[PLANNED] for record in records if PLANNED in record.result.statistics]
    return found[-1] / 1e3 if found else math.inf


def _with_note(records: list[PassRecord], message: str) -> list[PassRecord]:
    """The records, with a note of the pass that makes halves."""
    note = Remark("note", PASS, message)
    return [
        replace(record, result=replace(record.result, remarks=(*record.result.remarks, note)))
        if record.name == PASS
        else record
        for record in records
    ]
