"""How the next token is chosen from logits."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kimigraph.ir.errors import UsageError


@dataclass(frozen=True)
class Sampling:
    """How one sequence goes on, and when it ends.

    ``temperature`` 0 takes the likeliest token. Else logits are divided by it, the ``top_k`` likeliest stay (0: all),
    of those the fewest whose probabilities reach ``top_p``, and one is drawn. Draws follow from ``seed`` and the
    sequence's place in its call alone, whatever runs beside it. A sequence ends with ``max_new_tokens`` tokens, or
    with one of ``stop_ids`` (None: the model's own). UsageError for values that cannot be.
    """

    max_new_tokens: int = 16
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    stop_ids: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for good, text in (
            (self.max_new_tokens >= 1, f"max_new_tokens is {self.max_new_tokens}; it must be at least 1"),
            (0.0 <= self.temperature < float("inf"), f"temperature is {self.temperature}; give 0 (greedy) or more"),
            (self.top_k >= 0, f"top_k is {self.top_k}; give 0 (all tokens) or more"),
            (0.0 < self.top_p <= 1.0, f"top_p is {self.top_p}; it lies above 0, and at 1 keeps all tokens"),
        ):
            if not good:
                raise UsageError(f"sampling: {text}")


class Draws:
    """The uniform numbers of one sequence: a stream of its own for each (seed, place)."""

    def __init__(self, seed: int, place: int) -> None:
        digest = hashlib.sha256(f"{seed} {place}".encode()).digest()
        self._generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)

    def next(self) -> float:
        """A number in [0, 1)."""
        return torch.rand((), generator=self._generator, dtype=torch.float64).item()


def distribution(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor) -> tuple[Tensor, Tensor]:
    """Probabilities fp64 [N, V] of what may be drawn, likeliest first, and the token of each.

    ``logits`` [N, V]; the others [N]. Of equal logits the lower token comes first.
    """
    ordered, tokens = (logits.double() / temperature.unsqueeze(-1)).sort(dim=-1, descending=True, stable=True)
    ranks = torch.arange(logits.shape[-1], device=logits.device)
    kept = torch.where(top_k > 0, top_k, logits.shape[-1]).unsqueeze(-1)
    likely = torch.softmax(ordered.masked_fill(ranks >= kept, float("-inf")), dim=-1)
    before = likely.cumsum(-1) - likely
    likely = likely.masked_fill((before >= top_p.unsqueeze(-1)) & (ranks > 0), 0.0)
    return likely / likely.sum(-1, keepdim=True), tokens


def choose(logits: Tensor, samplings: Sequence[Sampling], draws: Sequence[Draws]) -> list[int]:
    """The next token of each row of ``logits`` [N, V]; a greedy row draws nothing."""
    chosen = logits.argmax(-1).tolist()
    drawn = [row for row, sampling in enumerate(samplings) if sampling.temperature > 0]
    if not drawn:
        return chosen

    def column(values: list[float] | list[int]) -> Tensor:
        return torch.tensor(values, device=logits.device)

    likely, tokens = distribution(
        logits[column(drawn)],
        column([samplings[row].temperature for row in drawn]).double(),
        column([samplings[row].top_k for row in drawn]),
        column([samplings[row].top_p for row in drawn]).double(),
    )
    uniform = column([draws[row].next() for row in drawn]).double().unsqueeze(-1)
    last = (likely > 0).sum(-1, keepdim=True) - 1  # what rounding leaves above the sum belongs to the last
    picks = torch.minimum((likely.cumsum(-1) <= uniform).sum(-1, keepdim=True), last)
    for row, token in zip(drawn, tokens.gather(-1, picks).squeeze(-1).tolist(), strict=True):
        chosen[row] = token
    return chosen
