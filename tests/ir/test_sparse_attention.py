import math

import pytest
import torch

ATTENTION = torch.ops.kimigraph.sparse_attention


def oracle(q_latent, q_rope, latent, rope, picks, scale):
    """One row and head from the definition in float64: q [L] and [R], caches [T, L] and [T, R], picks a list."""
    valid = [i for i in picks if 0 <= i < latent.shape[0]]
    logits = []
    for i in valid:
        dot = q_latent.double() @ latent[i].double()
        if q_rope is not None:
            dot = dot + q_rope.double() @ rope[i].double()
        logits.append(float(dot) * scale)
    if not valid:
        return torch.zeros_like(q_latent, dtype=torch.float64), -math.inf
    top = max(logits)
    masses = [math.exp(x - top) for x in logits]
    total = sum(masses)
    out = sum(m / total * latent[i].double() for m, i in zip(masses, valid, strict=True))
    return out, top + math.log(total)


def operands(batch=2, tokens=2, heads=3, total=11, width=8, rope_dim=4, k=6):
    picks = torch.stack([torch.randperm(total)[:k] for _ in range(batch * tokens)]).view(batch, tokens, k)
    picks[0, 0, 3:] = -1
    return (
        torch.randn(batch, tokens, heads, width),
        torch.randn(batch, tokens, heads, rope_dim) if rope_dim else None,
        torch.randn(batch, total, width),
        torch.randn(batch, total, rope_dim) if rope_dim else None,
        picks.to(torch.int32),
    )


@pytest.mark.parametrize(
    "sizes",
    [{}, {"rope_dim": 0}, {"heads": 1, "batch": 1, "tokens": 1}, {"width": 11, "total": 11, "k": 11}, {"tokens": 3}],
)
def test_against_the_definition(sizes):
    q_latent, q_rope, latent, rope, picks = operands(**sizes)
    out, lse = ATTENTION(q_latent, q_rope, latent, rope, picks, scale=0.3)
    for b, s, h in torch.cartesian_prod(*(torch.arange(n) for n in q_latent.shape[:3])).tolist():
        want, want_lse = oracle(
            q_latent[b, s, h],
            None if q_rope is None else q_rope[b, s, h],
            latent[b],
            None if rope is None else rope[b],
            picks[b, s].tolist(),
            0.3,
        )
        torch.testing.assert_close(out[b, s, h].double(), want, rtol=1e-5, atol=1e-6)
        assert lse[b, s, h].item() == pytest.approx(want_lse, rel=1e-5, abs=1e-6)


def test_an_empty_row_gives_zero_and_minus_infinity():
    q_latent, q_rope, latent, rope, picks = operands()
    picks[1, 1] = -1
    latent[1] = math.nan
    picks[1, 0] = -1
    out, lse = ATTENTION(q_latent, q_rope, latent, rope, picks, scale=0.3)
    assert torch.equal(out[1], torch.zeros_like(out[1]))
    assert torch.equal(lse[1], torch.full_like(lse[1], -math.inf))
    assert out[0].isfinite().all() and lse[0].isfinite().all()


def test_rows_that_are_not_picked_do_not_matter():
    q_latent, q_rope, latent, rope, picks = operands(k=4)
    want = ATTENTION(q_latent, q_rope, latent, rope, picks, scale=0.3)
    for b in range(2):
        unused = sorted(set(range(11)) - set(picks[b].flatten().tolist()))
        latent[b, unused] = math.nan
        rope[b, unused] = math.inf
    got = ATTENTION(q_latent, q_rope, latent, rope, picks, scale=0.3)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


def test_indices_beyond_the_cache_count_as_nothing():
    q_latent, q_rope, latent, rope, picks = operands()
    far = torch.where(picks < 0, 11, picks)
    want = ATTENTION(q_latent, q_rope, latent, rope, picks, scale=0.3)
    got = ATTENTION(q_latent, q_rope, latent, rope, far, scale=0.3)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


def test_parts_merge_by_their_lse():
    """Attention over two halves of the picks, merged, is attention over all; an empty half contributes nothing."""
    q_latent, q_rope, latent, rope, picks = operands(k=6)
    whole, lse = ATTENTION(q_latent, q_rope, latent, rope, picks, scale=0.3)
    parts = [ATTENTION(q_latent, q_rope, latent, rope, part, scale=0.3) for part in picks.split(3, -1)]
    assert parts[1][1][0, 0].isneginf().all()
    weights = [torch.exp(part_lse - lse).unsqueeze(-1) for _, part_lse in parts]
    torch.testing.assert_close(sum(w * out for w, (out, _) in zip(weights, parts, strict=True)), whole)


def test_constant_values_come_back_exactly_enough():
    """4096 picks, one of them far ahead: the weights sum to 1."""
    latent = torch.ones(1, 4096, 4)
    rope = torch.zeros(1, 4096, 1)
    rope[0, 7] = 20.0
    one = torch.ones(1, 1, 1, 1)
    out, _ = ATTENTION(torch.zeros(1, 1, 1, 4), one, latent, rope, torch.arange(4096).view(1, 1, -1), scale=1.0)
    torch.testing.assert_close(out, torch.ones_like(out), rtol=1e-5, atol=0)


@pytest.mark.parametrize("tokens", [1, 2, 3])
@pytest.mark.parametrize("length", [3, 4, 5, 64])
def test_pages_in_any_order_equal_a_contiguous_cache(tokens, length):
    page, capacity = 4, 64
    q_latent, q_rope, latent, rope, _ = operands(tokens=tokens, total=capacity)
    picks = torch.randint(0, length, (2, tokens, 9), dtype=torch.int32)
    table = torch.randperm(50)[: 2 * capacity // page].view(2, -1).to(torch.int32)
    pages, rope_pages = torch.full((50, page, 8), math.nan), torch.full((50, page, 4), math.nan)
    pages[table.long()], rope_pages[table.long()] = latent.view(2, -1, page, 8), rope.view(2, -1, page, 4)
    want = ATTENTION(q_latent, q_rope, latent, rope, picks, scale=0.3)
    got = ATTENTION(q_latent, q_rope, pages, rope_pages, picks, scale=0.3, block_table=table)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


def test_sequences_read_their_own_pages():
    """Pages are found through the table's row, not through the batch row: two rows in either order."""
    pages = torch.randn(6, 2, 8)
    table = torch.tensor([[5, 1], [0, 3]], dtype=torch.int32)
    q, picks = torch.randn(2, 1, 2, 8), torch.tensor([[[0, 3]], [[1, 2]]], dtype=torch.int32)
    out, _ = ATTENTION(q, None, pages, None, picks, scale=1.0, block_table=table)
    swapped, _ = ATTENTION(q.flip(0), None, pages, None, picks.flip(0), scale=1.0, block_table=table.flip(0))
    assert torch.equal(out.flip(0), swapped)
    want, _ = oracle(q[1, 0, 1], None, torch.cat([pages[0], pages[3]]), None, [1, 2], 1.0)
    torch.testing.assert_close(out[1, 0, 1].double(), want, rtol=1e-5, atol=1e-6)


def test_a_pick_on_an_unmapped_page_counts_as_nothing():
    pages = torch.randn(3, 4, 8)
    table = torch.tensor([[0, -1, 2]], dtype=torch.int32)
    q = torch.randn(1, 1, 2, 8)
    mapped = torch.tensor([[[1, 9, 2]]], dtype=torch.int32)
    want = ATTENTION(q, None, pages, None, mapped, scale=1.0, block_table=table)
    assert want[1].isfinite().all()
    got = ATTENTION(
        q, None, pages, None, torch.cat([mapped, mapped.new_tensor([[[5]]])], -1), scale=1.0, block_table=table
    )
    assert torch.equal(got[1], want[1])
    torch.testing.assert_close(got[0], want[0])
