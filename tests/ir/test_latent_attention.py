"""``latent_attention`` against its definition: attention over keys and values written out, softmax in float64."""

import math

import pytest
import torch

ATTENTION = torch.ops.kimigraph.latent_attention
LISTED = torch.ops.kimigraph.sparse_attention


def operands(batch=2, tokens=3, heads=2, total=9, width=8, turn=4):
    return (
        torch.randn(batch, tokens, heads, width),
        torch.randn(batch, tokens, heads, turn),
        torch.randn(batch, total, width),
        torch.randn(batch, total, turn),
    )


def oracle(q_latent, q_rope, latent, rope, lengths, scale, sink=None):
    """Torch's own softmax over a masked score matrix in float64; a sink is one more column without a value."""
    query = torch.cat([q_latent, q_rope], -1).double()
    keys = torch.cat([latent, rope], -1).double()
    scores = torch.einsum("bshd,btd->bsht", query, keys) * scale
    row = torch.arange(query.shape[1]).view(1, -1, 1, 1)
    hidden = torch.arange(keys.shape[1]) >= lengths.view(-1, 1, 1, 1) + row
    scores = scores.masked_fill(hidden, -math.inf)
    lse = scores.logsumexp(-1)
    if sink is not None:
        scores = torch.cat([scores, sink.double().view(1, 1, -1, 1).expand(*scores.shape[:3], 1)], -1)
    weights = scores.softmax(-1)[..., : keys.shape[1]]
    return torch.einsum("bsht,btl->bshl", weights, latent.double()), lse


@pytest.mark.parametrize("with_sink", [False, True])
def test_against_the_definition(with_sink):
    given = operands()
    lengths = torch.tensor([4, 8], dtype=torch.int32)
    sink = torch.tensor([0.7, -1.5]) if with_sink else None
    out, lse = ATTENTION(*given, lengths, scale=0.3, sink=sink)
    wanted, wanted_lse = oracle(*given, lengths, 0.3, sink)
    torch.testing.assert_close(out.double(), wanted, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse.double(), wanted_lse, rtol=1e-5, atol=1e-6)


def test_without_lengths_all_rows_count():
    given = operands()
    out, lse = ATTENTION(*given, scale=0.3)
    wanted, wanted_lse = oracle(*given, torch.tensor([9, 9]), 0.3)
    torch.testing.assert_close(out.double(), wanted, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse.double(), wanted_lse, rtol=1e-5, atol=1e-6)


def test_one_length_serves_all_sequences():
    given = operands()
    one, each = torch.tensor(5), torch.tensor([5, 5])
    for a, b in zip(ATTENTION(*given, one, scale=0.3), ATTENTION(*given, each, scale=0.3), strict=True):
        assert torch.equal(a, b)


def test_what_is_not_visible_does_not_matter():
    """Rows past a query's own limit may hold anything; a query that sees nothing gives 0 and -inf."""
    given = operands()
    lengths = torch.tensor([2, 0])
    wanted = ATTENTION(*given, lengths, scale=0.3)
    given[2][0, 4:], given[3][0, 4:], given[2][1, 2:], given[3][1, 2:] = math.nan, math.inf, math.nan, math.inf
    out, lse = ATTENTION(*given, lengths, scale=0.3)
    assert torch.equal(out, wanted[0]) and torch.equal(lse, wanted[1])
    assert out[1, 0].count_nonzero() == 0 and lse[1, 0].eq(-math.inf).all() and out[1, 1].count_nonzero() > 0


def test_sinks_of_listed_attention_weigh_as_a_key_without_a_value():
    """A row of zeros whose logit is the sink, listed once more, takes the same share."""
    q_latent, _, latent, _ = operands(heads=1)
    picks = torch.arange(9, dtype=torch.int32).expand(2, 3, 9)
    with_zero = torch.cat([latent, torch.zeros(2, 1, 8)], 1)
    more = torch.cat([picks, torch.full((2, 3, 1), 9, dtype=torch.int32)], -1)
    wanted, _ = LISTED(q_latent, None, with_zero, None, more, scale=0.3)
    out, lse = LISTED(q_latent, None, latent, None, picks, scale=0.3, sink=torch.zeros(1))
    torch.testing.assert_close(out, wanted)
    assert torch.equal(lse, LISTED(q_latent, None, latent, None, picks, scale=0.3)[1])


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"lengths": torch.tensor([1, 2, 3])}, r"lengths is \[3\]"),
        ({"lengths": torch.tensor([1.0, 2.0])}, "want an integer type"),
        ({"sink": torch.zeros(3)}, r"sink is \[3\]"),
        ({"rope": None}, "both q_rope and rope"),
    ],
)
def test_shapes_that_do_not_fit(change, complaint):
    names = ("q_latent", "q_rope", "latent", "rope")
    given = dict(zip(names, operands(), strict=True)) | change
    meta = {name: None if t is None else t.to("meta") for name, t in given.items()}
    with pytest.raises(ValueError, match=complaint):
        ATTENTION(**meta, scale=0.3)
