"""What stands before and around the times of ``kimigraph bench attnres``, on the CPU."""

import pytest
import torch

from kimigraph.bench import attention_residual as bench
from kimigraph.ir.errors import NumericsError
from kimigraph.ir.reference.attention_residual import attention_residual


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> bench.Operands:
    randn = torch.randn
    monkeypatch.setattr(bench.torch, "randn", lambda *sizes, **options: randn(*sizes))
    monkeypatch.setattr(bench, "WIDTH", 64)
    return bench.operands(3, 4)


def test_the_reference_passes_and_another_result_fails(given: bench.Operands) -> None:
    found = attention_residual(*given.values(), eps=bench.EPS, out_eps=bench.EPS)
    assert bench.checked("here", found, given) < 4e-3
    with pytest.raises(NumericsError, match="here: the result differs from the fp64 reference by"):
        bench.checked("here", found * 1.1, given)


def test_every_source_weight_and_result_moves_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "WIDTH", 8)
    assert bench.moved(tokens=3, sources=2) == 2 * 8 * (3 * 3 + 3)


def test_a_point_for_people() -> None:
    us = {"median": 10.0, "least": 9.5, "most": 10.5}
    point = {"tokens": 1, "sources": 9, "ours": {"us": us, "error": 2e-3}, "floor_us": 0.04}
    peers = {"fla": {"us": {"median": 20.0}, "ratio": 2.0}, "vllm": {"unavailable": "not here"}}
    assert bench.line({**point, "peers": peers}) == (
        "T 1 sources 9: 10.00 us (9.50-10.50), error 2.0e-03, floor 0.04 | fla 20.00 us, ratio 2.00 | vllm not here"
    )
