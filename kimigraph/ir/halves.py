"""What a program says of half-batches in its ``info``.

``halves`` is 2 for a step of two halves, ``WAITING`` for one that was captured for half of the batch and is to become
one; ``whole_batch`` has its batch then, and ``shared_inputs`` names the caller's inputs that have no rows of a batch.
"""

from collections.abc import Collection
from typing import Any

from kimigraph.ir.program import CapturedProgram

HALVES, WHOLE_BATCH, SHARED = "halves", "whole_batch", "shared_inputs"
WAITING = "captured"


def halves_of(program: CapturedProgram) -> Any:
    """2, ``WAITING``, or None for a step as it was captured."""
    return program.info.get(HALVES)


def mark_waiting(program: CapturedProgram, batch: int, shared: Collection[str]) -> None:
    """``program`` is the step of half of ``batch``."""
    program.info |= {HALVES: WAITING, WHOLE_BATCH: batch, SHARED: sorted(shared)}


def mark_doubled(program: CapturedProgram) -> None:
    """``program`` has become the step of its whole batch."""
    program.info |= {HALVES: 2, "batch": program.info.pop(WHOLE_BATCH)}
    del program.info[SHARED]
