"""Ranks of ``exchange_picks`` as processes under Triton's interpreter: a script, since ranks must run at the same time.

Rooms lie in memory that forked processes share, where addresses are the same for all. Rows take turns through a room of
two; contested candidates are compared with one another up to four a rank. Prints what went wrong, or nothing.
"""

import mmap
import os
import signal
import traceback
from dataclasses import dataclass
from typing import Any

import torch

from kimigraph.bench.kernels import kernel_for
from kimigraph.codegen.specialize import exchange_picks as sizes_of
from kimigraph.ir.lock_step import in_lock_step
from kimigraph.ir.reference.exchange_picks import exchanging

ROWS, SECONDS = 5, 90
Given = list[tuple[torch.Tensor, torch.Tensor]]
"""Scores and places of each rank."""


def shared(shape: tuple[int, ...], value: int) -> torch.Tensor:
    """A tensor that forked processes write into together."""
    found = torch.empty(shape, dtype=torch.int32)
    memory = mmap.mmap(-1, found.nbytes)
    return torch.frombuffer(memory, dtype=torch.int32).view(shape).fill_(value)


@dataclass
class Ranks:
    """What the launches of some ranks work on; one step after the other for each of ``steps``."""

    sizes: dict[str, Any]
    each: int
    steps: list[Given]

    def __post_init__(self) -> None:
        empty, ways = torch.empty(ROWS, 1, self.each), self.sizes["ways"]
        given = {"scores": empty, "places": empty.int()}
        self.module = kernel_for("exchange_picks", given, {**self.sizes, "group": "kimigraph.sp"})
        self.constants = self.module.CONSTANTS["exchange_rows"]
        self.rooms = [shared((2 * (ways - 1) * (self.constants["WORDS"] + 3),), self.none) for _ in range(ways)]
        self.peers = [torch.tensor([*[room.data_ptr() for room in self.rooms], rank]) for rank in range(ways)]
        self.outs = [[shared(self.module.CONSTANTS["out"], 77) for _ in range(ways)] for _ in self.steps]
        self.told = torch.full(self.module.CONSTANTS["told"], -5, dtype=torch.int32)
        self.rounds = torch.zeros(self.constants["ROWS"], dtype=torch.int32)

    @property
    def none(self) -> int:
        """What a word is that has not come."""
        return self.constants["NONE"]

    def launch(self, rank: int) -> None:
        """All steps of a rank, as the module's ``launch`` does them."""
        together = self.constants["ROWS"]
        for given, outs in zip(self.steps, self.outs, strict=True):
            lines = [tensor.view(ROWS, -1) for tensor in (*given[rank], outs[rank])]
            for first in range(0, ROWS, together):
                some = [line[first : first + together] for line in lines]
                self.module.exchange_rows[(len(some[0]),)](
                    *some, self.told, self.peers[rank], self.rounds, **self.constants
                )

    def run(self) -> None:
        """All ranks beside one another; none outlives another that failed, nor its time."""
        ranks = [self._started(rank) for rank in range(self.sizes["ways"])]
        while ranks:
            process, code = os.wait()
            ranks.remove(process)
            if code:
                for other in ranks:
                    os.kill(other, signal.SIGKILL)
                raise SystemExit(f"a rank of {self.sizes} ended with {code}")

    def _started(self, rank: int) -> int:
        process = os.fork()
        if process == 0:
            signal.alarm(SECONDS)
            try:
                self.launch(rank)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        return process

    def check(self) -> None:
        """Print where ranks found other places than the reference, and which left words behind."""
        for number, (given, outs) in enumerate(zip(self.steps, self.outs, strict=True)):
            asking = [exchanging(scores, places, rank, **self.sizes) for rank, (scores, places) in enumerate(given)]
            for rank, (wanted, out) in enumerate(zip(in_lock_step(asking)[0], outs, strict=True)):
                if not torch.equal(wanted, out):
                    print(f"{self.sizes} step {number} rank {rank}: {out.tolist()} for {wanted.tolist()}")
        for rank, room in enumerate(self.rooms):
            if not bool((room == self.none).all()):
                print(f"{self.sizes} rank {rank}: words are left")


def picked(held: list[int], scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Places of a rank that holds some keys of each row, ascending, at random; then -1."""
    places = torch.full(scores.shape, -1, dtype=torch.int32)
    for row, number in enumerate(held):
        places[row, 0, :number] = torch.randperm(4 * scores.shape[-1])[:number].sort().values.int()
    return torch.where(places >= 0, scores, -torch.inf), places


def steps_of(ways: int, each: int) -> list[Given]:
    """Scores of several kinds; rows of which all ranks have keys, one has, one has none, none has."""
    shape = ROWS, 1, each
    reals, rare = torch.randn(ways, *shape), torch.rand(ways, *shape) < 0.2
    kinds = [
        reals + 5.0 * torch.arange(ways).view(-1, 1, 1, 1),
        torch.randint(0, 3, (ways, *shape)).float(),
        torch.zeros(ways, *shape) * reals.sign(),
        torch.where(rare, torch.inf, torch.where(reals < -1, torch.nan, reals * 3e38)),
    ]
    held = [[each, each if rank == 1 else 0, rank * each // 2, each - rank, 0] for rank in range(ways)]
    return [[picked(held[rank], kind[rank]) for rank in range(ways)] for kind in kinds]


def main() -> None:
    """Three ranks with fewer keys than winners, no size a power of two; and two that have as many."""
    torch.manual_seed(0)
    sizes_of.TOGETHER, sizes_of.COMPARED = 2, 16
    for ways, each, k, run in ((3, 20, 24, 7), (2, 16, 16, 1)):
        ranks = Ranks({"k": k, "ways": ways, "run": run}, each, steps_of(ways, each))
        ranks.run()
        ranks.check()


if __name__ == "__main__":
    main()
