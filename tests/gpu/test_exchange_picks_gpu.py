"""The exchange of candidates in one launch: each rank is a stream of one GPU, and gives what the reference gives."""

from typing import Any

import pytest
import torch
from rank_rooms import RankRooms

from kimigraph.bench.kernels import kernel_for
from kimigraph.ir.lock_step import in_lock_step
from kimigraph.ir.reference.exchange_picks import exchanging
from kimigraph.ir.reference.index_exchange import exchange, local_candidates

pytestmark = pytest.mark.gpu

Given = list[tuple[torch.Tensor, torch.Tensor]]
"""Scores and places of each rank."""


class Ranks:
    """The kernel of ``ways`` ranks, and what they keep between rounds."""

    def __init__(self, rows: int, each: int, k: int, ways: int, run: int) -> None:
        self.sizes: dict[str, Any] = {"k": k, "ways": ways, "run": run}
        empty = torch.empty(rows, 1, each, device="cuda")
        given = {"scores": empty, "places": empty.int()}
        self.module = kernel_for("exchange_picks", given, {**self.sizes, "group": "kimigraph.sp"})
        self.constants = self.module.CONSTANTS["exchange_rows"]
        self.rooms = RankRooms(self.constants, rows, ways)
        self.told = [self.filled("told", -5) for _ in range(ways)]

    def filled(self, name: str, value: int) -> torch.Tensor:
        return torch.full(self.module.CONSTANTS[name], value, dtype=torch.int32, device="cuda")

    def launch(self, rank: int, scores: torch.Tensor, places: torch.Tensor, out: torch.Tensor) -> None:
        self.module.exchange_rows[(self.module.CONSTANTS["rows"],)](
            scores, places, out, self.told[rank], self.rooms.peers[rank], self.rooms.rounds[rank],
            **self.constants, **self.module.CONSTANTS["options"],
        )  # fmt: skip

    def round(self, given: Given, late: int) -> list[torch.Tensor]:
        found = [self.filled("out", 77) for _ in given]
        self.rooms.meet(lambda rank: self.launch(rank, *given[rank], found[rank]), late)
        return found

    def wanted(self, given: Given) -> list[torch.Tensor]:
        asking = [
            exchanging(scores.cpu(), places.cpu(), rank, **self.sizes) for rank, (scores, places) in enumerate(given)
        ]
        return in_lock_step(asking)[0]

    def check(self, given: Given, late: int = 0) -> None:
        for own, wanted in zip(self.round(given, late), self.wanted(given), strict=True):
            assert torch.equal(own.cpu(), wanted)
        assert self.rooms.cleared()


def picked(rows: int, each: int, held: list[int], scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Places of a rank that holds some keys of each row, ascending, at random; then -1."""
    places = torch.full((rows, 1, each), -1, dtype=torch.int32)
    for row, number in enumerate(held):
        chosen = torch.randperm(4 * each)[: min(number, each)].sort().values
        places[row, 0, : len(chosen)] = chosen.int()
    scores = torch.where(places >= 0, scores, -torch.inf)
    return scores.cuda(), places.cuda()


@pytest.mark.parametrize(
    ("ways", "each", "k", "run"), [(2, 2048, 2048, 64), (4, 512, 512, 64), (3, 100, 128, 7), (2, 5, 9, 1)]
)
def test_what_the_reference_gives(ways: int, each: int, k: int, run: int) -> None:
    torch.manual_seed(each)
    rows, ranks = 6, Ranks(6, each, k, ways, run)
    kinds = {
        "reals": lambda: torch.randn(rows, 1, each),
        "alike": lambda: torch.randn(rows, 1, each),
        "ties": lambda: torch.randint(0, 3, (rows, 1, each)).float(),
        "equal": lambda: torch.zeros(rows, 1, each),
        "signed zeros": lambda: torch.zeros(rows, 1, each) * (torch.randint(0, 2, (rows, 1, each)) * 2 - 1),
        "outliers": lambda: torch.randn(rows, 1, each) * 1e-6 + 1e30 * (torch.rand(rows, 1, each) < 0.01),
        "infinite": lambda: torch.where(torch.rand(rows, 1, each) < 0.1, torch.inf, torch.randn(rows, 1, each)),
        "nan": lambda: torch.where(torch.rand(rows, 1, each) < 0.1, torch.nan, torch.randn(rows, 1, each)),
        "far apart": lambda: torch.randn(rows, 1, each) * 3e38,
    }
    for number, make in enumerate(kinds.values()):
        given = []
        for rank in range(ways):
            held = [each, 0, rank * each // 2, each // 3 + rank, 0 if rank else each, 1]
            given.append(picked(rows, each, held, make() + (5.0 * rank if number == 0 else 0.0)))
        ranks.check(given, late=number % (ways + 1))


def test_winners_of_one_rank() -> None:
    """All that wins lies on one rank, so that the others tell nothing that counts."""
    torch.manual_seed(1)
    ranks = Ranks(4, 256, 256, 4, 64)
    given = [picked(4, 256, [256] * 4, torch.rand(4, 1, 256) + (100.0 if rank == 2 else 0.0)) for rank in range(4)]
    ranks.check(given)


def test_as_many_contested_as_are_compared_at_once_and_more() -> None:
    """Ten of the keys at 501 win. They are all of them, or as many as a rank may have for the short way, or more."""
    torch.manual_seed(3)
    ranks = Ranks(5, 512, 512, 2, 64)
    few = ranks.constants["FEW"]
    numbers = [10, 11, few, few + 1, 512]
    low, high = torch.rand(2, 5, 1, 512), 900 + torch.rand(5, 1, 512)
    column, contested = torch.arange(512), torch.tensor(numbers).view(-1, 1, 1)
    for step in (0.5, 0.0):  # all different, all equal
        near = 501 + step * torch.rand(5, 1, 512)
        first = torch.where((column + 7) % 512 < contested, near, low[0])
        second = torch.where(column >= 10, high, low[1])
        given = [picked(5, 512, [512] * 5, scores) for scores in (first, second)]
        tokens = torch.arange(512)
        asking = [
            exchange(local_candidates(scores.cpu()[:, 0], torch.ones(5, 512, dtype=torch.bool), tokens, 512), 512, 2)
            for scores, _ in given
        ]
        assert in_lock_step(asking)[0][0].contested.tolist() == numbers
        ranks.check(given)


def test_rounds_of_a_graph_with_changing_data() -> None:
    """Rounds follow one another without the host between them: each is checked by what it lists."""
    torch.manual_seed(2)
    rows, each, ways, rounds = 3, 200, 2, 12
    ranks = Ranks(rows, each, each, ways, 16)
    start = [picked(rows, each, [each] * rows, torch.randn(rows, 1, each)) for _ in range(ways)]
    held = [scores.clone() for scores, _ in start]
    kept = [[ranks.filled("out", 77) for _ in range(rounds)] for _ in range(ways)]
    ranks.round([(scores.clone(), places) for scores, places in start], late=0)

    def steps(rank: int) -> None:
        for out in kept[rank]:
            held[rank].mul_(-1.25).add_(rank)
            ranks.launch(rank, held[rank], start[rank][1], out)

    ranks.rooms.replay([ranks.rooms.captured(rank, lambda rank=rank: steps(rank)) for rank in range(ways)])
    now = [scores.clone() for scores, _ in start]
    for number in range(rounds):
        now = [scores.mul_(-1.25).add_(rank) for rank, scores in enumerate(now)]
        wanted = ranks.wanted([(scores, places) for scores, (_, places) in zip(now, start, strict=True)])
        assert all(torch.equal(kept[rank][number].cpu(), own) for rank, own in enumerate(wanted))
    assert ranks.rooms.cleared()


def test_more_rows_than_share_the_room_are_refused_nothing() -> None:
    """The launch takes them in turn: its constants say how many at a time, and rooms are no larger for more."""
    few, many = Ranks(512, 4, 4, 2, 1), Ranks(1300, 4, 4, 2, 1)
    assert many.constants["ROWS"] == few.constants["ROWS"] == 512 and many.constants["WORDS"] == few.constants["WORDS"]
    assert many.module.CONSTANTS["rows"] == 1300
