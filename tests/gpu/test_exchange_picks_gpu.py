"""The exchange of candidates in one launch: each rank is a stream of one GPU, and gives what the reference gives."""

from typing import Any

import pytest
import torch

from kimigraph.bench.kernels import kernel_for
from kimigraph.ir.lock_step import in_lock_step
from kimigraph.ir.reference.exchange_picks import exchanging

pytestmark = pytest.mark.gpu


class Ranks:
    """The kernel of ``ways`` ranks, and what they keep between rounds."""

    def __init__(self, rows: int, each: int, k: int, ways: int, run: int) -> None:
        self.sizes: dict[str, Any] = {"k": k, "ways": ways, "run": run}
        empty = torch.empty(rows, 1, each, device="cuda")
        given = {"scores": empty, "places": empty.int()}
        self.module = kernel_for("exchange_picks", given, {**self.sizes, "group": "kimigraph.sp"})
        self.constants = self.module.CONSTANTS["exchange_rows"]
        words, none = self.constants["WORDS"], self.constants["NONE"]
        size = 2 * (ways - 1) * (words + 3)
        self.rooms = [torch.full((size,), none, dtype=torch.int32, device="cuda") for _ in range(ways)]
        places = [room.data_ptr() for room in self.rooms]
        self.peers = [torch.tensor([*places, rank], dtype=torch.int64, device="cuda") for rank in range(ways)]
        self.rounds = [torch.zeros(rows, dtype=torch.int32, device="cuda") for _ in range(ways)]
        self.streams = [torch.cuda.Stream() for _ in range(ways)]

    def round(self, given: list[tuple[torch.Tensor, torch.Tensor]], late: int) -> list[tuple[torch.Tensor, ...]]:
        found = []
        torch.cuda.synchronize()
        for _ in given:
            shape, keys = self.module.CONSTANTS["out"], self.module.CONSTANTS["lists"]
            out = [torch.full(shape, 77, dtype=torch.int32, device="cuda") for _ in range(2)]
            scratch = torch.full(keys, -5, dtype=torch.int32, device="cuda")
            torch.cuda.synchronize()
            found.append((*out, scratch))
        for rank, (scores, places) in enumerate(given):
            with torch.cuda.stream(self.streams[rank]):
                if rank == late:
                    torch.cuda._sleep(2_000_000)
                self.module.exchange_rows[(self.module.CONSTANTS["rows"],)](
                    scores, places, *found[rank], self.peers[rank], self.rounds[rank],
                    **self.constants, **self.module.CONSTANTS["options"],
                )  # fmt: skip
        torch.cuda.synchronize()
        return found

    def check(self, given: list[tuple[torch.Tensor, torch.Tensor]], late: int = 0) -> None:
        asking = [
            exchanging(scores.cpu(), places.cpu(), rank, **self.sizes) for rank, (scores, places) in enumerate(given)
        ]
        wanted, _ = in_lock_step(asking)
        for (own, every, _), (own_wanted, every_wanted) in zip(self.round(given, late), wanted, strict=True):
            assert torch.equal(every.cpu(), every_wanted)
            assert torch.equal(own.cpu(), own_wanted)
        assert all(bool((room == self.constants["NONE"]).all()) for room in self.rooms)


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
    """All that wins lies on one rank, so that it sends k and the others nothing that counts."""
    torch.manual_seed(1)
    ranks = Ranks(4, 256, 256, 4, 64)
    given = [picked(4, 256, [256] * 4, torch.rand(4, 1, 256) + (100.0 if rank == 2 else 0.0)) for rank in range(4)]
    ranks.check(given)


def test_rounds_of_a_graph_with_changing_data() -> None:
    """Rounds follow one another without the host between them: each is checked by what it lists."""
    torch.manual_seed(2)
    rows, each, ways, rounds = 3, 200, 2, 12
    ranks = Ranks(rows, each, each, ways, 16)
    start = [picked(rows, each, [each] * rows, torch.randn(rows, 1, each)) for _ in range(ways)]
    held = [scores.clone() for scores, _ in start]
    shape, graphs, kept = ranks.module.CONSTANTS["out"], [], []
    ranks.round([(scores.clone(), places) for scores, places in start], late=0)
    for rank, (_, places) in enumerate(start):
        outs = [[torch.empty(shape, dtype=torch.int32, device="cuda") for _ in range(2)] for _ in range(rounds)]
        lists = torch.empty(ranks.module.CONSTANTS["lists"], dtype=torch.int32, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=ranks.streams[rank]):
            for own, every in outs:
                held[rank].mul_(-1.25).add_(rank)
                ranks.module.exchange_rows[(rows,)](
                    held[rank], places, own, every, lists, ranks.peers[rank], ranks.rounds[rank],
                    **ranks.constants, **ranks.module.CONSTANTS["options"],
                )  # fmt: skip
        graphs.append(graph)
        kept.append(outs)
    for rank, graph in enumerate(graphs):
        with torch.cuda.stream(ranks.streams[rank]):
            graph.replay()
    torch.cuda.synchronize()
    now = [scores.clone() for scores, _ in start]
    for number in range(rounds):
        now = [scores.mul_(-1.25).add_(rank) for rank, scores in enumerate(now)]
        asking = [
            exchanging(scores.cpu(), places.cpu(), rank, **ranks.sizes)
            for rank, (scores, (_, places)) in enumerate(zip(now, start, strict=True))
        ]
        for rank, (own, every) in enumerate(in_lock_step(asking)[0]):
            assert torch.equal(kept[rank][number][0].cpu(), own) and torch.equal(kept[rank][number][1].cpu(), every)


def test_more_rows_than_share_the_room_are_refused_nothing() -> None:
    """The launch takes them in turn: its constants say how many at a time, and rooms are no larger for more."""
    few, many = Ranks(512, 4, 4, 2, 1), Ranks(1300, 4, 4, 2, 1)
    assert many.constants["ROWS"] == few.constants["ROWS"] == 512 and many.constants["WORDS"] == few.constants["WORDS"]
    assert many.module.CONSTANTS["rows"] == 1300
