import math

import pytest
import torch

INDEXER = torch.ops.kimigraph.lightning_indexer
NAN, INF = math.nan, math.inf


def oracle(q, keys, weights, k, scale, visible):
    """The picks of one row, key by key in float64: q [H, D], keys [T, D], weights [H], visible [T]."""
    candidates = []
    for t in range(keys.shape[0]):
        score = 0.0
        for h in range(q.shape[0]):
            dot = float(q[h].double() @ keys[t].double()) * scale
            score += float(weights[h]) * (dot if dot > 0 or math.isnan(dot) else 0.0)
        if visible[t]:
            candidates.append((-score if not math.isnan(score) else INF, t))
    picked = sorted(t for _, t in sorted(candidates)[:k])
    return picked + [-1] * (k - len(picked))


def rows(scores, k, **options):
    """Picks for given scores: one head with weight 1, keys of width 1."""
    scores = torch.as_tensor(scores)
    batch, total = scores.shape
    one = torch.ones(batch, 1, 1, 1, dtype=scores.dtype)
    return INDEXER(one, scores.view(batch, total, 1), one[..., 0], k=k, scale=1.0, **options)[:, 0].tolist()


@pytest.mark.parametrize(("batch", "tokens", "heads", "total", "width", "k"), [(2, 3, 4, 17, 8, 5), (1, 1, 1, 9, 9, 9)])
@pytest.mark.parametrize("seed", range(4))
def test_against_the_definition(batch, tokens, heads, total, width, k, seed):
    """Small whole numbers keep every sum exact, and make many ties."""
    g = torch.Generator().manual_seed(seed)
    q = torch.randint(-2, 3, (batch, tokens, heads, width), generator=g).float()
    keys = torch.randint(-2, 3, (batch, total, width), generator=g).float()
    weights = torch.randint(-2, 3, (batch, tokens, heads), generator=g).float()
    lengths = torch.randint(0, total + 1, (batch,), generator=g)
    mask = torch.rand(batch, 1, total, generator=g) < 0.7
    for given in ({}, {"lengths": lengths}, {"mask": mask}, {"lengths": lengths, "mask": mask}):
        got = INDEXER(q, keys, weights, k=k, scale=0.5, **given)
        for b in range(batch):
            for s in range(tokens):
                seen = torch.ones(total, dtype=torch.bool)
                if "lengths" in given:
                    seen &= torch.arange(total) < lengths[b] + s
                if "mask" in given:
                    seen &= mask[b, 0]
                assert got[b, s].tolist() == oracle(q[b, s], keys[b], weights[b, s], k, 0.5, seen)


@pytest.mark.parametrize(("total", "k", "ones"), [(300, 64, 5), (8320, 2048, 100)])
def test_a_plateau_of_equal_scores_fills_the_rest_in_index_order(total, k, ones):
    scores = torch.zeros(1, total)
    winners = torch.randperm(total)[:ones]
    scores[0, winners] = 1.0
    picked = rows(scores, k)[0]
    assert len(set(picked)) == k and picked == sorted(picked) and 0 <= picked[0] and picked[-1] < total
    rest = [t for t in range(total) if t not in set(winners.tolist())][: k - ones]
    assert set(picked) == set(winners.tolist()) | set(rest)


def test_nan_ranks_as_minus_infinity():
    assert rows([[1.0, NAN, INF, -INF, 2.0]], 3) == [[0, 2, 4]]
    assert rows([[NAN, NAN, NAN, NAN]], 3) == [[0, 1, 2]]
    # A visible NaN comes before a hidden key, whatever that one scores.
    mask = torch.tensor([[[True, True, False, True]]])
    assert rows([[NAN, 1.0, INF, NAN]], 3, mask=mask) == [[0, 1, 3]]


def test_minus_zero_is_zero():
    """One key scores -0 (weight -1 times ReLU 0) between keys that score +0."""
    q = torch.tensor([[[[1.0], [-1.0]]]])
    keys = torch.tensor([[[0.0], [-0.0], [0.0]]])
    weights = torch.tensor([[[-1.0, -1.0]]])
    assert INDEXER(q, keys, weights, k=2, scale=1.0).tolist() == [[[0, 1]]]


def test_products_are_summed_in_fp32():
    """In fp16 both dots (115200 and 119040) would be infinite and tie."""
    q = torch.full((1, 1, 1, 128), 30.0, dtype=torch.float16)
    keys = torch.tensor([30.0, 31.0], dtype=torch.float16).view(1, 2, 1).expand(1, 2, 128)
    assert INDEXER(q, keys, torch.ones(1, 1, 1, dtype=torch.float16), k=1, scale=1.0).tolist() == [[[1]]]


def test_heads_are_rectified_and_summed_before_the_pick():
    """Dots [-5, 1] and [3, 0]: with ReLU key 0 scores 3 and key 1 scores 1; without it -2 and 1."""
    q = torch.tensor([[[[1.0, 0.0], [0.0, 1.0]]]])
    keys = torch.tensor([[[-5.0, 3.0], [1.0, 0.0]]])
    assert INDEXER(q, keys, torch.ones(1, 1, 2), k=1, scale=1.0).tolist() == [[[0]]]


def test_rows_of_a_chunk_see_by_the_cache_not_by_the_chunk():
    """3 new tokens over 7 keys, 5 of them visible to the first row."""
    picked = INDEXER(
        torch.ones(1, 3, 2, 4), torch.ones(1, 7, 4), torch.ones(1, 3, 2), torch.tensor([5]), k=7, scale=1.0
    )
    assert picked[0].tolist() == [[0, 1, 2, 3, 4, -1, -1], [0, 1, 2, 3, 4, 5, -1], [0, 1, 2, 3, 4, 5, 6]]


def test_a_row_is_the_same_alone_and_in_a_batch():
    lengths = torch.tensor([3, 50, 3, 50])
    q, keys = torch.randint(-3, 4, (4, 1, 2, 8)).float(), torch.randint(-3, 4, (4, 50, 8)).float()
    together = INDEXER(q, keys, torch.ones(4, 1, 2), lengths, k=8, scale=1.0)
    for b in range(4):
        alone = INDEXER(q[b : b + 1], keys[b : b + 1], torch.ones(1, 1, 2), lengths[b : b + 1], k=8, scale=1.0)
        assert torch.equal(together[b : b + 1], alone)


@pytest.mark.parametrize("poison", [INF, -INF, NAN, 1e30])
def test_what_lies_beyond_a_rows_length_does_not_matter(poison):
    scores = torch.randn(2, 12)
    lengths = torch.tensor([4, 9])
    clean = rows(scores, 6, lengths=lengths)
    scores[0, 4:] = poison
    scores[1, 9:] = poison
    assert rows(scores, 6, lengths=lengths) == clean
    assert clean[0][-2:] == [-1, -1]


def test_empty_rows_give_nothing():
    assert rows(torch.randn(3, 5), 4, lengths=torch.zeros(3, dtype=torch.int32)) == [[-1] * 4] * 3
    assert rows(torch.randn(2, 0), 3) == [[-1] * 3] * 2
    assert rows(torch.randn(2, 5), 0) == [[], []]


def test_k_beyond_the_cache_is_padded():
    assert rows([[3.0, 1.0, 2.0]], 5) == [[0, 1, 2, -1, -1]]


def test_pages_in_any_order_give_logical_positions():
    batch, page, total = 3, 4, 20
    keys = torch.randn(batch, total, 8)
    q, weights, lengths = torch.randn(batch, 2, 4, 8), torch.randn(batch, 2, 4), torch.tensor([0, 7, 20])
    table = torch.randperm(32)[: batch * total // page].view(batch, -1).to(torch.int32)
    pages = torch.full((32, page, 8), NAN)
    pages[table.long()] = keys.view(batch, -1, page, 8)
    want = INDEXER(q, keys, weights, lengths, k=6, scale=1.0)
    assert torch.equal(INDEXER(q, pages, weights, lengths, k=6, scale=1.0, block_table=table), want)


def test_keys_on_unmapped_pages_are_never_listed():
    pages = torch.arange(12.0).view(3, 4, 1) + 1
    table = torch.tensor([[0, -1, 2]], dtype=torch.int32)
    one = torch.ones(1, 1, 1, 1)
    assert INDEXER(one, pages, one[..., 0], k=8, scale=1.0, block_table=table).tolist() == [
        [[0, 1, 2, 3, 8, 9, 10, 11]]
    ]
    assert INDEXER(one, pages, one[..., 0], k=9, scale=1.0, block_table=table)[0, 0, -1] == -1
