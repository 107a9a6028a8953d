"""Which rewrites may happen: a number for each, so that bisecting can find the one that breaks the program."""

from collections.abc import Callable
from dataclasses import dataclass, field


def allow_all(rewrite: str) -> bool:
    """Whether the rewrite called ``rewrite`` may happen: always."""
    del rewrite
    return True


class RewriteGate:
    """Asked before every rewrite. This one allows all."""

    def allow(self, rewrite: str) -> bool:
        """Whether the rewrite called ``rewrite`` may happen."""
        return allow_all(rewrite)


def _any_number(number: int) -> bool:
    return number > 0


@dataclass
class NumberedRewrites(RewriteGate):
    """Numbers rewrites from 1 in the order in which they are announced and allows those that ``allowed`` says.

    Why numbers and not names: a pass may rewrite one place more than once.
    """

    allowed: Callable[[int], bool] = _any_number
    announced: list[str] = field(default_factory=lambda: [])

    def allow(self, rewrite: str) -> bool:
        """Number the rewrite and look it up."""
        self.announced.append(rewrite)
        return self.allowed(len(self.announced))
