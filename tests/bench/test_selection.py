"""The checks that stand before the times of ``kimigraph bench li``, on the CPU."""

import pytest
import torch

from kimigraph.bench import lightning_indexer as bench
from kimigraph.bench.lightning_indexer import IndexerInputs, check, scores_of
from kimigraph.bench.selection import line
from kimigraph.ir.errors import NumericsError


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> IndexerInputs:
    """Two pages of keys; what the module makes on the GPU is made here."""
    arange = torch.arange
    monkeypatch.setattr(bench.torch, "arange", lambda *a, **options: arange(*a, **{**options, "device": "cpu"}))
    generator = torch.Generator().manual_seed(0)
    pages = torch.zeros(2, 64 * 132, dtype=torch.uint8)
    pages[:, :8192] = torch.randn(2, 8192, generator=generator).to(torch.float8_e4m3fn).view(torch.uint8)
    pages[:, 8192:] = (torch.rand(2, 64, generator=generator) + 0.5).view(torch.uint8)
    q = torch.randn(1, 1, 1, 64, 128, generator=generator).to(torch.float8_e4m3fn)
    weights = torch.randn(1, 1, 1, 64, generator=generator)
    tables = torch.tensor([[[1, 0]]], dtype=torch.int32)
    return IndexerInputs(q, weights, pages.view(2, 64, 132), tables, torch.tensor([128], dtype=torch.int32))


def best(given: IndexerInputs, count: int) -> torch.Tensor:
    scores = scores_of(given.q[0], given.pages[given.tables[0, 0].long()], given.weights[0])
    return scores.topk(count).indices


def test_the_right_keys_pass(given: IndexerInputs) -> None:
    picked = best(given, 20).sort().values.int().reshape(1, 1, 20)
    check("here", picked, given, 0, 0)


def test_a_wrong_key_fails(given: IndexerInputs) -> None:
    wrong = best(given, 128)
    picked = torch.cat([wrong[:19], wrong[-1:]]).sort().values.int().reshape(1, 1, 20)
    with pytest.raises(NumericsError, match="here: row 0 misses a key by"):
        check("here", picked, given, 0, 0)


def test_keys_out_of_order_fail(given: IndexerInputs) -> None:
    picked = best(given, 20).sort(descending=True).values.int().reshape(1, 1, 20)
    with pytest.raises(NumericsError, match="in ascending order"):
        check("here", picked, given, 0, 0)


def test_a_point_for_people() -> None:
    us = {"median": 10.0, "least": 9.5, "most": 10.5}
    peers = {"deep_gemm": {"us": us, "ratio": 1.0}, "other": {"unavailable": "not installed"}}
    text = line({"batch": 1, "length": 8192, "k": 2048, "ours": {"us": us}, "floor_us": 0.25, "peers": peers})
    wanted = (
        "B 1 L 8192 k 2048: 10.00 us (9.50-10.50), floor 0.25 | deep_gemm 10.00 us, ratio 1.00 | other not installed"
    )
    assert text == wanted


def test_the_form_of_the_kernel_is_shown() -> None:
    us = {"median": 10.0, "least": 9.5, "most": 10.5}
    ours = {"us": us, "route": "two launches"}
    text = line({"batch": 1, "length": 8192, "k": 128, "ours": ours, "floor_us": 0.25, "peers": {}})
    assert text == "B 1 L 8192 k 128: 10.00 us (9.50-10.50), floor 0.25, two launches"


def test_every_size_is_timed_for_both_numbers_of_picks() -> None:
    assert len(bench.POINTS) == 18 and {picks for _, _, picks in bench.POINTS} == {128, 2048}
    assert set(bench.TIED) <= set(bench.POINTS)
