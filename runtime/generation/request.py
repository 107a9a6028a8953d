"""One sequence from its prompt to its end."""

from dataclasses import dataclass, field
from typing import Literal

from kimigraph.runtime.generation.sampling import Draws, Sampling

Finish = Literal["stop", "length", "context", "aborted"]
"""Why a sequence ended: a stop token, its own limit, a full cache, or because it was told to."""


@dataclass(eq=False)
class Request:
    """A sequence that waits, is being read, runs or has ended. ``written`` of its tokens are in the caches; the hidden
    states of the last ``unread`` of those wait for the layer that makes drafts of them, where there is one."""

    number: int
    prompt: tuple[int, ...]
    sampling: Sampling
    draws: Draws
    stop_ids: frozenset[int]
    tokens: list[int] = field(default_factory=lambda: [])
    written: int = 0
    finish: Finish | None = None
    unread: int = 0

    @property
    def pending(self) -> int:
        """Tokens of the prompt that are not in the caches yet."""
        return max(len(self.prompt) - self.written, 0)

    @property
    def length(self) -> int:
        """Tokens of prompt and answer so far."""
        return len(self.prompt) + len(self.tokens)

    def ids(self, start: int, stop: int) -> list[int]:
        """The tokens of prompt and answer from place ``start`` to ``stop``, as far as there are any."""
        behind = len(self.prompt)
        return [*self.prompt[start:stop], *self.tokens[max(start - behind, 0) : max(stop - behind, 0)]]

    def take(self, token: int, context: int) -> None:
        """The next token; it ends the sequence where it is the last that there can be."""
        self.tokens.append(token)
        if token in self.stop_ids:
            self.finish = "stop"
        elif len(self.tokens) >= self.sampling.max_new_tokens:
            self.finish = "length"
        elif self.written >= context:
            self.finish = "context"


@dataclass(frozen=True)
class Event:
    """A new token of the sequence ``number``, with the reason when it is the last; None for a sequence aborted."""

    number: int
    token: int | None
    finish: Finish | None = None


@dataclass(frozen=True)
class Completion:
    """What became of a prompt. ``tokens`` are the new ones, a stop token included; ``text`` needs a tokenizer."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    finish: Finish
    text: str | None = None
