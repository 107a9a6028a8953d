"""Which rank holds which tokens of a sequence that ranks share out."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class SequenceShards:
    """Runs of ``run`` tokens go to ``ways`` ranks in turn, so that a growing sequence grows on all of them.

    Local token l of a rank is token (l // run) * ways * run + rank * run + l % run of the sequence.
    """

    ways: int
    run: int = 64

    def __post_init__(self) -> None:
        if self.ways < 1 or self.run < 1:
            raise ValueError(f"{self.ways} ranks with runs of {self.run} tokens: both must be positive")

    def owner(self, tokens: torch.Tensor) -> torch.Tensor:
        """The rank that holds each token."""
        return tokens // self.run % self.ways

    def local(self, tokens: torch.Tensor) -> torch.Tensor:
        """The place of each token on the rank that holds it."""
        return tokens // (self.run * self.ways) * self.run + tokens % self.run

    def tokens(self, local: torch.Tensor, rank: int) -> torch.Tensor:
        """The tokens of the sequence at places of ``rank``."""
        return (local // self.run * self.ways + rank) * self.run + local % self.run

    def held(self, length: torch.Tensor, rank: int) -> torch.Tensor:
        """How many of the first ``length`` tokens ``rank`` holds: its places below that are theirs."""
        rounds, rest = length // (self.run * self.ways), length % (self.run * self.ways)
        return rounds * self.run + (rest - rank * self.run).clamp(0, self.run)
