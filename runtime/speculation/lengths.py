"""How many drafts a sequence is worth, by how often its drafts were right so far."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from kimigraph.runtime.generation.request import Request

LEAST_CHANCE = 0.15
"""A draft is made while the chance that it stays, and all before it, is at least this."""
FADING = 0.9
"""What an earlier test counts for against the next one."""
PROBE = 8
"""A sequence whose drafts are hopeless tries one again at every token of this number."""


@dataclass
class _Tests:
    """Drafts tested and found right, the later ones counting more; begun as if one of one had been right."""

    right: float = 1.0
    tested: float = 1.0


@dataclass
class DraftLengths:
    """The number of drafts of each sequence, from its own history alone: what runs beside it changes nothing.

    With every draft right with the same chance a, k drafts all stay with a^k: the longest k with a^k of at least
    ``LEAST_CHANCE`` is taken. A draft behind the first wrong one was not tested.
    """

    most: int
    _tests: dict[int, _Tests] = field(default_factory=lambda: {})

    def wanted(self, running: Mapping[int, Request]) -> dict[int, int]:
        """Drafts for each sequence, by slot."""
        numbers = {request.number for request in running.values()}
        self._tests = {number: tests for number, tests in self._tests.items() if number in numbers}
        return {slot: self._length(request) for slot, request in running.items()}

    def observe(self, request: Request, drafted: int, right: int) -> None:
        """Of ``drafted`` drafts the first ``right`` stayed."""
        if not drafted:
            return
        tests = self._tests.setdefault(request.number, _Tests())
        for place in range(min(right + 1, drafted)):
            tests.tested = tests.tested * FADING + 1.0
            tests.right = tests.right * FADING + float(place < right)

    def _length(self, request: Request) -> int:
        tests = self._tests.get(request.number, _Tests())
        chance = tests.right / tests.tested
        length, together = 0, chance
        while length < self.most and together >= LEAST_CHANCE:
            length, together = length + 1, together * chance
        return length or int(len(request.tokens) % PROBE == 0)
