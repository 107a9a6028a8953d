"""Drafts that know how each prompt goes on, and are right, wrong or something between on purpose."""

from collections.abc import Mapping
from dataclasses import dataclass

from kimigraph.runtime.generation import Request

Known = Mapping[tuple[int, ...], tuple[int, ...]]
"""What each prompt goes on with."""


@dataclass
class Scripted:
    """A draft of each kind of ``mode`` for a model of ``vocabulary`` tokens whose pages have ``page``."""

    known: Known
    mode: str
    vocabulary: int = 256
    page: int = 8
    asked: int = 0

    def propose(self, rows: int, running: Mapping[int, Request], tokens: int) -> dict[int, list[int]]:
        self.asked += 1
        return {slot: self.follow(slot, request, tokens) for slot, request in running.items()}

    def follow(self, slot: int, request: Request, tokens: int) -> list[int]:
        done, known = len(request.tokens), self.known[request.prompt]
        truth = [*known[done : done + tokens], *[0] * tokens][:tokens]
        first = len(request.prompt) + done
        wrong = [(token + 1) % self.vocabulary for token in truth]
        match self.mode:
            case "right":
                return truth
            case "wrong":
                return wrong
            case "random":
                return [(token + (7 * first + place) % 3 // 2) % self.vocabulary for place, token in enumerate(truth)]
            case "page":  # right up to the last place of a page
                return [token if (first + at) % self.page else wrong[at] for at, token in enumerate(truth)]
            case "short":
                return truth[: (first + slot) % (tokens + 1)]
            case "lapse":  # wrong, then none: a plain step behind rejected drafts
                return wrong if self.asked % 2 else []
            case _:
                return truth if slot % 2 else []
