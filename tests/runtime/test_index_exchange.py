"""The pruned exchange of index candidates: exact on any shards, with ties, and with the bytes that it says."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kimigraph.ir.errors import CompileError
from kimigraph.ir.lock_step import in_lock_step
from kimigraph.ir.reference.collectives import Gather, Sum
from kimigraph.ir.reference.index_exchange import (
    CANDIDATE_BYTES,
    Exchanged,
    bytes_a_row,
    exchange,
    exchange_all,
    local_candidates,
    room,
)
from kimigraph.ir.reference.key_scores import key_scores
from kimigraph.ir.reference.lightning_indexer import lightning_indexer
from kimigraph.ir.reference.sequence_shards import SequenceShards

SPECIAL = [math.nan, -math.inf, math.inf, -0.0, 0.0]


def wanted(scores: torch.Tensor, visible: torch.Tensor, k: int) -> torch.Tensor:
    """The first k of each row, ascending, by a sort of Python's."""
    rows: list[list[int]] = []
    for values, shown in zip(scores.tolist(), visible.tolist(), strict=True):
        keys = [(-(-math.inf if math.isnan(value) else value + 0.0), token) for token, value in enumerate(values)]
        picked = sorted(token for _, token in sorted(key for key, seen in zip(keys, shown, strict=True) if seen)[:k])
        rows.append(picked + [-1] * (k - len(picked)))
    return torch.tensor(rows, dtype=torch.int32)


def exchanged(
    scores: torch.Tensor, visible: torch.Tensor, k: int, shards: SequenceShards, by: Any = exchange
) -> tuple[list[Exchanged], int]:
    """What each of simulated ranks finds, which sees its own tokens alone, and the bytes that they sent."""
    ranks: list[Any] = []
    every = torch.arange(scores.shape[1])
    for rank in range(shards.ways):
        mine = every[shards.owner(every) == rank]
        ranks.append(by(local_candidates(scores[:, mine], visible[:, mine], mine, k), k, shards.ways))
    return in_lock_step(ranks)


def together(results: list[Exchanged]) -> torch.Tensor:
    """All ranks' winners [R, k], ascending, then -1; each rank's are such a list, and no two have one token."""
    for result in results:
        rows = [[token for token in row if token >= 0] for row in result.tokens.tolist()]
        k = result.tokens.shape[1]
        assert result.tokens.tolist() == [sorted(set(row)) + [-1] * (k - len(row)) for row in rows]
    every = torch.cat([result.tokens for result in results], -1)
    behind = torch.iinfo(torch.int32).max
    first = torch.where(every < 0, behind, every).sort(-1).values
    assert (first[:, results[0].tokens.shape[1] :] == behind).all()
    return torch.where(first == behind, -1, first)[:, : results[0].tokens.shape[1]]


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_ranks_find_what_one_device_does(data: st.DataObject) -> None:
    ways, run = data.draw(st.integers(1, 5)), data.draw(st.sampled_from([1, 2, 8]))
    rows, tokens, k = (
        data.draw(st.integers(1, 3)),
        data.draw(st.integers(0, 40)),
        data.draw(st.sampled_from([1, 4, 12])),
    )
    few = st.sampled_from([*SPECIAL, 1.0, 2.0, 1e-30, 3e38])  # ties everywhere
    many = st.floats(width=32, allow_nan=True, allow_infinity=True)
    values = data.draw(
        st.lists(data.draw(st.sampled_from([few, many])), min_size=rows * tokens, max_size=rows * tokens)
    )
    scores = torch.tensor(values, dtype=torch.float32).reshape(rows, tokens)
    lengths = torch.tensor(data.draw(st.lists(st.integers(0, tokens), min_size=rows, max_size=rows)))
    visible = torch.arange(tokens) < lengths.unsqueeze(-1)
    shards = SequenceShards(ways, run)
    answer = wanted(scores, visible, k)
    for by in (exchange, exchange_all):
        results, _ = exchanged(scores, visible, k, shards, by)
        assert torch.equal(together(results), answer)
        for rank, result in enumerate(results):
            assert (shards.owner(result.tokens[result.tokens >= 0]) == rank).all()


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 6), st.integers(1, 9), st.integers(0, 200))
def test_shards_cover_every_token_once(ways: int, run: int, length: int) -> None:
    shards, tokens = SequenceShards(ways, run), torch.arange(length)
    held = [int(shards.held(torch.tensor(length), rank)) for rank in range(ways)]
    assert sum(held) == length
    for rank in range(ways):
        mine = shards.tokens(torch.arange(held[rank]), rank)
        assert mine.tolist() == tokens[shards.owner(tokens) == rank].tolist()
        assert shards.local(mine).tolist() == list(range(held[rank]))


def test_bytes_are_those_of_the_plan_and_fewer_than_the_targets() -> None:
    torch.manual_seed(0)
    rows, tokens, k = 2, 20_000, 2048
    visible = torch.arange(tokens) < torch.tensor([[tokens], [tokens - 777]])
    scores = torch.randn(rows, tokens)
    for ways, target in ((2, 1.3), (4, 2.4)):
        [first, *_], sent = exchanged(scores, visible, k, SequenceShards(ways))
        plan = bytes_a_row(k, ways)
        assert not first.overflowed and sent == rows * plan["pruned"]
        _, unpruned = exchanged(scores, visible, k, SequenceShards(ways), exchange_all)
        assert unpruned == rows * ways * k * CANDIDATE_BYTES == rows * plan["unpruned"]
        assert unpruned / sent >= target
        assert sent < rows * tokens * 4  # sending scores


def test_contested_keys_beyond_the_room_are_sent_instead() -> None:
    shards, k, tokens = SequenceShards(2, 8), 64, 512
    visible = torch.ones(1, tokens, dtype=torch.bool)
    for scores, contested in (
        (torch.zeros(1, tokens), 2 * k),
        (torch.where(torch.arange(tokens) < 60, 2.0, torch.where(torch.arange(tokens) < 70, 1.0, 0.0))[None], 10),
        (torch.where(torch.arange(tokens) < 60, 2.0, torch.where(torch.arange(tokens) < 68, 1.0, 0.0))[None], 8),
    ):
        results, sent = exchanged(scores, visible, k, shards)
        assert all(result.overflowed == (contested > room(k)) for result in results) and room(k) == 8
        assert [int(result.contested) for result in results] == [contested] * 2
        assert torch.equal(together(results), wanted(scores, visible, k))
        plan = bytes_a_row(k, 2)
        assert sent == plan["pruned"] + (plan["overflow"] if contested > room(k) else 0)


def test_a_bin_of_which_all_win_needs_no_room() -> None:
    """Of the second bin's 20 keys all are wanted, which is more than the room, and none of them is sent."""
    shards, k, tokens = SequenceShards(2, 8), 64, 512
    scores = torch.where(torch.arange(tokens) < 44, 2.0, torch.where(torch.arange(tokens) < 64, 1.0, 0.0))[None]
    results, sent = exchanged(scores, torch.ones(1, tokens, dtype=torch.bool), k, shards)
    assert int(results[0].contested) == 20 and not results[0].overflowed
    assert together(results).tolist() == [list(range(64))] and sent == bytes_a_row(k, 2)["pruned"]


def test_winners_of_one_rank_stay_within_the_room() -> None:
    shards, k, tokens = SequenceShards(2, 8), 64, 512
    every = torch.arange(tokens)
    scores = torch.where(shards.owner(every) == 1, 1.0 + every / tokens, every / tokens).unsqueeze(0)
    visible = torch.ones(1, tokens, dtype=torch.bool)
    results, _ = exchanged(scores, visible, k, shards)
    assert not results[0].overflowed and (results[0].tokens == -1).all() and (results[1].tokens >= 0).all()
    assert torch.equal(together(results), wanted(scores, visible, k))


def test_tokens_beyond_what_a_float_holds_are_exact() -> None:
    tokens = torch.tensor([10_000_001, 16_777_217, 16_777_219, 2_000_000_001])
    scores = torch.tensor([[1.0, 5.0, 5.0, 2.0]])
    own = local_candidates(scores, torch.ones(1, 4, dtype=torch.bool), tokens, 3)
    none = local_candidates(scores[:, :0], torch.ones(1, 0, dtype=torch.bool), tokens[:0], 3)
    results, _ = in_lock_step([exchange(own, 3, 2), exchange(none, 3, 2)])
    assert results[0].tokens.tolist() == [[16_777_217, 16_777_219, 2_000_000_001]]
    assert results[1].tokens.tolist() == [[-1, -1, -1]]


def test_the_indexer_over_shards_is_that_of_one_device() -> None:
    torch.manual_seed(1)
    batch, heads, total, k = 3, 4, 50, 8
    q, keys, weights = torch.randn(batch, 1, heads, 8), torch.randn(batch, total, 8), torch.randn(batch, 1, heads)
    lengths = torch.tensor([50, 1, 17])
    picks = lightning_indexer(q, keys, weights, lengths, None, k=k, scale=1.0)
    scores = key_scores(q, keys, weights, scale=1.0)[:, 0]
    visible = torch.arange(total) < lengths.unsqueeze(-1)
    for ways in (2, 3, 4):
        results, _ = exchanged(scores, visible, k, SequenceShards(ways, 4))
        assert torch.equal(together(results), picks[:, 0])


def test_ranks_that_ask_for_different_collectives_are_refused() -> None:
    def asks(kind: Any) -> Any:
        yield kind(torch.zeros(2))

    with pytest.raises(CompileError, match="different collectives"):
        in_lock_step([asks(Sum), asks(Gather)])
    with pytest.raises(ValueError, match="must be positive"):
        SequenceShards(0)
