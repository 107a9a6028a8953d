"""What a program says of half-batches in its ``info``.

``halves`` is 2 for a step of two halves, ``WAITING`` for one that was captured for half of the batch and is to become
one; ``batch`` is that half's until then.
"""

from typing import Any

from kimigraph.ir.program import CapturedProgram

HALVES = "halves"
WAITING = "captured"


def halves_of(program: CapturedProgram) -> Any:
    """2, ``WAITING``, or None for a step as it was captured."""
    return program.info.get(HALVES)


def mark_waiting(program: CapturedProgram, half: int) -> None:
    """``program`` is the step of ``half`` of the batch's sequences."""
    program.info |= {HALVES: WAITING, "batch": half}


def mark_doubled(program: CapturedProgram) -> None:
    """``program`` has become the step of its whole batch."""
    program.info |= {HALVES: 2, "batch": 2 * program.info["batch"]}
