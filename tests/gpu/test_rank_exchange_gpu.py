"""Sums and gathers of ranks in one launch: each rank is a stream of one GPU here, with a room in its memory."""

import pytest
import torch
from rank_rooms import RankRooms

from kimigraph.bench.kernels import kernel_for

pytestmark = pytest.mark.gpu


class Ranks:
    """The kernel of ``ways`` ranks, and what they keep between rounds."""

    def __init__(self, op: str, part: torch.Tensor, ways: int, **attributes: int) -> None:
        given = {"addend" if op == "rank_sum" else "part": part}
        self.module = kernel_for(op, given, {**attributes, "ways": ways, "group": "kimigraph.tp"})
        self.name = "sum_ranks" if op == "rank_sum" else "gather_ranks"
        [programs] = self.module.CONSTANTS["grid"]
        assert ways * programs <= 1024, "programs of all ranks must fit this GPU at once"
        self.rooms = RankRooms(self.module.CONSTANTS[self.name], programs, ways)

    def launch(self, rank: int, x: torch.Tensor, out: torch.Tensor) -> None:
        kernel, constants = getattr(self.module, self.name), self.module.CONSTANTS
        kernel[constants["grid"]](
            x.view(-1).view(torch.int32), out.view(-1).view(torch.int32), self.rooms.peers[rank],
            self.rooms.rounds[rank], **constants[self.name], **constants["options"],
        )  # fmt: skip

    def round(self, given: list[torch.Tensor], late: int | None = None) -> list[torch.Tensor]:
        """One call of every rank, the rank ``late`` behind the others."""
        results = [torch.empty(self.module.CONSTANTS["out"], dtype=x.dtype, device="cuda") for x in given]
        self.rooms.meet(lambda rank: self.launch(rank, given[rank], results[rank]), late)
        return results


def parts(shape: tuple[int, ...], dtype: torch.dtype, ways: int) -> list[torch.Tensor]:
    return [(torch.randn(shape, device="cuda") * 4).to(dtype) for _ in range(ways)]


@pytest.mark.parametrize("ways", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(8, 1, 2304), (64, 1, 1152), (1, 1, 64), (7, 1, 34)])
def test_sums(ways: int, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    torch.manual_seed(ways)
    ranks = Ranks("rank_sum", parts(shape, dtype, 1)[0], ways)
    for number in range(7):
        given = parts(shape, dtype, ways)
        wanted = given[0].float()
        for x in given[1:]:
            wanted = wanted + x.float()
        for out in ranks.round(given, late=number % (ways + 1)):
            assert torch.equal(out, wanted.to(dtype))
    assert ranks.rooms.cleared()


def test_a_nan_arrives_whatever_its_bits() -> None:
    ranks = Ranks("rank_sum", torch.zeros(64, dtype=torch.bfloat16, device="cuda"), 2)
    given = parts((64,), torch.bfloat16, 2)
    given[0].view(torch.int32)[3] = -1  # the word that says that none has come
    wanted = given[0].float() + given[1].float()
    assert wanted.isnan().sum() == 2
    for out in ranks.round(given):
        assert torch.equal(out.isnan(), wanted.isnan()) and torch.equal(
            out[~out.isnan()], wanted[~wanted.isnan()].bfloat16()
        )


@pytest.mark.parametrize("ways", [2, 4])
@pytest.mark.parametrize(
    ("shape", "dim", "dtype"),
    [((64, 1, 1152), 2, torch.bfloat16), ((16, 1, 2048), 0, torch.int32), ((3, 5, 34), 1, torch.float32)],
)
def test_gathers(ways: int, shape: tuple[int, ...], dim: int, dtype: torch.dtype) -> None:
    torch.manual_seed(ways)
    ranks = Ranks("rank_gather", torch.zeros(shape, dtype=dtype, device="cuda"), ways, dim=dim)
    for number in range(5):
        given = parts(shape, dtype, ways)
        if dtype == torch.int32:
            given = [x.clamp_min(-1) for x in given]  # picks, and -1 behind them
        for out in ranks.round(given, late=number % (ways + 1)):
            assert torch.equal(out, torch.cat(given, dim))
    assert ranks.rooms.cleared()


def test_a_thousand_rounds_of_a_graph_with_changing_data() -> None:
    """Rounds follow one another without the host between them; each rank's stream replays a graph of its own."""
    ways, shape = 2, (8, 1, 2304)
    ranks = Ranks("rank_sum", parts(shape, torch.bfloat16, 1)[0], ways)
    given, held = parts(shape, torch.float32, ways), parts(shape, torch.bfloat16, ways)
    totals = [torch.zeros(shape, device="cuda") for _ in range(ways)]
    ranks.round(held)

    def steps(rank: int) -> None:
        out = torch.empty_like(held[rank])
        for _ in range(4):
            given[rank].mul_(-0.75).add_(1.0)
            held[rank].copy_(given[rank])
            ranks.launch(rank, held[rank], out)
            totals[rank].add_(out)

    own = [x.clone() for x in given]
    ranks.rooms.replay([ranks.rooms.captured(rank, lambda rank=rank: steps(rank)) for rank in range(ways)], 250)
    wanted = torch.zeros(shape, device="cuda")
    for _ in range(1000):
        own = [x.mul_(-0.75).add_(1.0) for x in own]
        wanted.add_((own[0].bfloat16().float() + own[1].bfloat16().float()).bfloat16())
    assert torch.equal(totals[0], totals[1]) and torch.equal(totals[0], wanted)
