"""The checks that stand before the prefill times of ``kimigraph bench li``, on the CPU."""

import pytest
import torch

from kimigraph.bench import indexer_prefill as bench
from kimigraph.bench.indexer_prefill import PromptInputs, check
from kimigraph.bench.pair import line
from kimigraph.ir.descriptors import IndexKeyDescriptor
from kimigraph.ir.errors import NumericsError
from kimigraph.ir.reference.lightning_indexer import lightning_indexer

FORM = str(IndexKeyDescriptor("paged", "float8_e4m3fn", 128, page_size=64, scales="power2"))


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> PromptInputs:
    """Six rows at the end of 128 keys."""
    monkeypatch.setattr(bench, "CHECKED", (0, 5))
    monkeypatch.setattr(bench, "PICKS", 20)
    generator = torch.Generator().manual_seed(0)
    pages = torch.zeros(2, 64 * 132, dtype=torch.uint8)
    pages[:, :8192] = torch.randn(2, 8192, generator=generator).to(torch.float8_e4m3fn).view(torch.uint8)
    pages[:, 8192:] = (torch.rand(2, 64, generator=generator) + 0.5).view(torch.uint8)
    q = torch.randn(1, 6, 64, 128, generator=generator).to(torch.float8_e4m3fn)
    weights = torch.randn(1, 6, 64, generator=generator)
    table, lengths = torch.tensor([[1, 0]], dtype=torch.int32), torch.tensor([123], dtype=torch.int32)
    return PromptInputs(q, weights, pages.view(2, 64, 132), table, lengths)


def picked(given: PromptInputs) -> torch.Tensor:
    q, keys, weights, lengths, _, table = given.operands()
    assert q is not None and keys is not None and weights is not None
    return lightning_indexer(q, keys, weights, lengths, k=20, scale=1.0, block_table=table, descriptor=FORM)


def test_the_right_keys_pass(given: PromptInputs) -> None:
    check("here", picked(given), given)


def test_a_wrong_key_fails(given: PromptInputs) -> None:
    wrong = picked(given)
    wrong[0, 5] = torch.arange(20, dtype=torch.int32)
    with pytest.raises(NumericsError, match="here: row 5 misses a key by"):
        check("here", wrong, given)


def test_a_key_that_is_not_visible_yet_fails(given: PromptInputs) -> None:
    wrong = picked(given)
    wrong[0, 0, -1] = 123
    with pytest.raises(NumericsError, match="here: row 0 does not list 20 keys in ascending order"):
        check("here", wrong, given)


def test_keys_of_the_peer_stand_in_the_order_of_positions(given: PromptInputs) -> None:
    keys, scales = given.contiguous()
    flat = given.pages.view(2, -1)
    assert torch.equal(keys[:64].view(torch.uint8).flatten(), flat[1, :8192])
    assert torch.equal(scales[64:], flat[0, 8192:].contiguous().view(torch.float32))


def test_a_pair_for_people() -> None:
    us = {"median": 20.0, "least": 19.5, "most": 20.5}
    ours = {"us": us, "error": 0.0025, "nodes": {"kernels": 2, "memsets": 0}}
    found = {"batch": 8, "length": 8192, "floor_us": 4.5, "ours": ours, "peers": {"x": {"us": us, "ratio": 1.0}}}
    assert line(found) == (
        "B 8 L 8192: 20.00 us, floor 4.50, 2 kernels, 0 memsets, error 2.5e-03 | x 20.00 us, ratio 1.00"
    )
