"""What ``kimigraph bench sfa`` measures, and what it says of peers that are not there."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from kimigraph.bench import latent_attention, sparse_attention
from kimigraph.bench.peers import ATTENTION_PEERS, DENSE_PEERS, LISTED_PEERS, PeerUnavailableError
from kimigraph.bench.protocol import Timing
from kimigraph.ir.descriptors import parse_descriptor


def test_listed_and_dense_points_go_where_they_belong(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, Any]] = []

    def listed(heads: int, batch: int, peers: Sequence[str]) -> dict[str, Any]:
        asked.append(("listed", (heads, batch, None)))
        return {}

    def dense(heads: int, batch: int, context: int, peers: Sequence[str]) -> dict[str, Any]:
        asked.append(("dense", (heads, batch, context)))
        return {}

    monkeypatch.setattr(sparse_attention, "listed_point", listed)
    monkeypatch.setattr(latent_attention, "point", dense)
    for shape in sparse_attention.POINTS:
        sparse_attention.point(*shape, ())
    assert [shape for _, shape in asked] == list(sparse_attention.POINTS)
    assert all((kind == "dense") == (shape[2] is not None) for kind, shape in asked)
    assert {shape[:2] for kind, shape in asked if kind == "dense"} == {(32, 8), (32, 64)}


def test_each_peer_is_of_one_form() -> None:
    assert set(ATTENTION_PEERS) == {*LISTED_PEERS, *DENSE_PEERS} and not set(LISTED_PEERS) & set(DENSE_PEERS)


def test_a_peer_that_is_missing_is_named_and_others_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    def prepare(peer: str) -> Any:
        if peer == "absent":
            raise PeerUnavailableError("not installed")
        return [], torch.ones(2)

    monkeypatch.setattr(sparse_attention, "adaptor", lambda name: name)
    monkeypatch.setattr(sparse_attention, "time_in_graph", lambda calls: Timing(30.0, 29.0, 31.0))
    found = sparse_attention.compare(["absent", "present"], prepare, 20.0, lambda result: float(result.sum()) / 1000)
    assert found["absent"] == {"unavailable": "not installed"}
    assert found["present"]["ratio"] == 1.5 and found["present"]["error"] == 0.002


def test_the_dense_cache_holds_latent_and_rope_in_one_row() -> None:
    form = parse_descriptor(latent_attention.FORM)
    assert getattr(form, "row", None) == latent_attention.WIDTH == 576
