"""Where drafts come from."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from kimigraph.runtime.generation.request import Request


class Draft(Protocol):
    """Guesses what running sequences go on with. A wrong guess costs time alone."""

    def propose(self, rows: int, running: Mapping[int, Request], tokens: int) -> dict[int, list[int]]:
        """Up to ``tokens`` tokens for each sequence, by its slot (below ``rows``); a sequence may be left out."""
        ...


@runtime_checkable
class FollowsModel(Protocol):
    """What a draft may have beside ``propose``: it is told what the model's own steps did, before anything counts them
    (``Request.written``)."""

    def prepare(self, rows: int) -> None:
        """Compile now what drafts of so many rows take."""
        ...

    def prepare_reading(self, tokens: int) -> None:
        """The same for a piece of a prompt."""
        ...

    def read(self, request: Request, tokens: int) -> None:
        """A piece of a prompt was read in the staging place."""
        ...

    def stepped(self, rows: int, running: Mapping[int, Request]) -> None:
        """A plain step took in the last token of each sequence."""
        ...

    def verified(self, rows: int, running: Mapping[int, Request], made: list[int]) -> None:
        """A round gave each sequence ``made`` tokens, by slot."""
        ...


@dataclass
class _Seen:
    """Prompt and tokens of a sequence, and where each run of them ended last; the first ``read`` are in it."""

    history: list[int]
    ends: dict[tuple[int, ...], int] = field(default_factory=lambda: {})
    read: int = 0


class NgramDraft:
    """Looks the last tokens of a sequence up in the sequence itself, and proposes what followed them there.

    The longest run that stood before counts, from ``longest`` tokens down to ``shortest``; of several places the
    latest. Prompts and what was made are searched alike; no model is needed.
    """

    def __init__(self, longest: int = 4, shortest: int = 2) -> None:
        self._lengths = range(longest, shortest - 1, -1)
        self._seen: dict[int, _Seen] = {}

    def propose(self, rows: int, running: Mapping[int, Request], tokens: int) -> dict[int, list[int]]:
        """What followed; a sequence whose last tokens are new is left out."""
        del rows
        numbers = {request.number for request in running.values()}
        self._seen = {number: seen for number, seen in self._seen.items() if number in numbers}
        found = {slot: self._follow(request, tokens) for slot, request in running.items()}
        return {slot: draft for slot, draft in found.items() if draft}

    def _follow(self, request: Request, tokens: int) -> list[int]:
        if request.number not in self._seen:
            self._seen[request.number] = _Seen(list(request.prompt))
        seen = self._seen[request.number]
        history = seen.history
        history += request.tokens[len(history) - len(request.prompt) :]
        # What ends at the last token itself is looked up, and noted when there is a token behind it.
        for end in range(seen.read, len(history) - 1):
            for length in self._lengths:
                if end + 1 >= length:
                    seen.ends[tuple(history[end + 1 - length : end + 1])] = end + 1
        seen.read = len(history) - 1
        for length in self._lengths:
            start = seen.ends.get(tuple(history[-length:])) if len(history) >= length else None
            if start is not None:
                return history[start : start + tokens]
        return []
