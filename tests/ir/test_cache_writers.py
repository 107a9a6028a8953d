import pytest
import torch

from kimigraph.models.kimi_k31.indexer import rope_angles, rotate

LATENT, KEYS = torch.ops.kimigraph.latent_write, torch.ops.kimigraph.index_key_write


def test_rows_land_at_their_positions_and_negative_ones_nowhere():
    keys = torch.zeros(2, 5, 3)
    values = torch.randn(2, 3, 3)
    assert KEYS(keys, values, torch.tensor([[4, 0, -1], [2, -7, 3]])) is None
    want = torch.zeros(2, 5, 3)
    want[0, 4], want[0, 0], want[1, 2], want[1, 3] = values[0, 0], values[0, 1], values[1, 0], values[1, 2]
    assert torch.equal(keys, want)


@pytest.mark.parametrize("rope_dim", [None, 0, 2])
def test_latent_and_rope_go_together_and_take_the_caches_type(rope_dim):
    latent = torch.zeros(1, 4, 3, dtype=torch.bfloat16)
    rope = None if rope_dim is None else torch.zeros(1, 4, rope_dim, dtype=torch.bfloat16)
    values = torch.randn(1, 2, 3)
    rope_values = None if rope_dim is None else torch.randn(1, 2, rope_dim)
    LATENT(latent, rope, values, rope_values, torch.tensor([[3, 1]], dtype=torch.int32))
    assert torch.equal(latent[0, [3, 1]], values[0].bfloat16()) and latent[0, [0, 2]].count_nonzero() == 0
    if rope is not None:
        assert torch.equal(rope[0, [3, 1]], rope_values[0].bfloat16())


def test_pages_are_found_through_the_table():
    keys = torch.zeros(7, 2, 3)
    table = torch.tensor([[6, 1], [0, 4]], dtype=torch.int32)
    values = torch.randn(2, 2, 3)
    KEYS(keys, values, torch.tensor([[1, 2], [3, 0]]), block_table=table)
    want = torch.zeros(7, 2, 3)
    want[6, 1], want[1, 0], want[4, 1], want[0, 0] = values[0, 0], values[0, 1], values[1, 0], values[1, 1]
    assert torch.equal(keys, want)
    latent, rope = torch.zeros(7, 2, 3), torch.zeros(7, 2, 1)
    LATENT(latent, rope, values, values[..., :1], torch.tensor([[1, 2], [3, 0]]), block_table=table)
    assert torch.equal(latent, want) and torch.equal(rope, want[..., :1])


def test_a_position_beyond_the_mapped_pages_writes_nothing():
    """4 pages of 4, position 16: an error, and the good rows of the call are not written either."""
    keys = torch.zeros(6, 4, 3)
    table = torch.tensor([[0, 1, 2, 3]])
    with pytest.raises(IndexError, match="position 16 lies beyond the cache's 16 positions"):
        KEYS(keys, torch.ones(1, 2, 3), torch.tensor([[0, 16]]), block_table=table)
    with pytest.raises(IndexError, match="position 4 lies beyond the cache's 4 positions"):
        LATENT(keys, None, torch.ones(6, 1, 3), None, torch.tensor([[0], [4], [0], [0], [0], [0]]))
    assert keys.count_nonzero() == 0


def test_an_unmapped_page_writes_nothing():
    latent, rope = torch.zeros(3, 4, 3), torch.zeros(3, 4, 1)
    table = torch.tensor([[2, 0], [1, -1]])
    message = "position 5 of sequence 1 lies on a page that is not mapped"
    with pytest.raises(IndexError, match=message):
        LATENT(latent, rope, torch.ones(2, 1, 3), torch.ones(2, 1, 1), torch.tensor([[5], [5]]), block_table=table)
    with pytest.raises(IndexError, match=message):
        KEYS(latent, torch.ones(2, 1, 3), torch.tensor([[5], [5]]), block_table=table)
    assert latent.count_nonzero() == 0 and rope.count_nonzero() == 0
    LATENT(latent, rope, torch.ones(2, 1, 3), torch.ones(2, 1, 1), torch.tensor([[5], [-1]]), block_table=table)
    assert latent.count_nonzero() == 3


def test_written_rows_are_read_back_by_indexer_and_attention():
    """A round trip over pages: what the writer stores at a position, the readers find there."""
    table = torch.tensor([[3, 1]], dtype=torch.int32)
    keys, latent = torch.zeros(4, 2, 3), torch.zeros(4, 2, 3)
    values = torch.tensor([[[1.0, 0, 0], [0, 5, 0], [0, 0, 9]]])
    KEYS(keys, values, torch.tensor([[0, 1, 2]]), block_table=table)
    LATENT(latent, None, values, None, torch.tensor([[0, 1, 2]]), block_table=table)
    q = torch.ones(1, 1, 1, 3)
    picks = torch.ops.kimigraph.lightning_indexer(
        q, keys, q[..., 0], torch.tensor([3]), k=1, scale=1.0, block_table=table
    )
    assert picks.tolist() == [[[2]]]
    out, _ = torch.ops.kimigraph.sparse_attention(q, None, latent, None, picks, scale=1.0, block_table=table)
    assert torch.equal(out[0, 0, 0], values[0, 2])


@pytest.mark.parametrize("style", ["half_split", "interleaved"])
def test_norm_and_rotation_are_those_of_the_model(style):
    """LayerNorm, then the first dims turned: what DeepSeek's indexer caches, in fp32 throughout."""
    x, weight, bias = torch.randn(2, 3, 16), torch.randn(16), torch.randn(16)
    angles = rope_angles(torch.tensor([[0, 5, 9], [1, 2, 700]]), 8, 1e4)
    keys = torch.zeros(2, 4, 16)
    positions = torch.tensor([[0, 1, 2], [3, 2, 1]])
    KEYS(keys, x, positions, weight, bias, angles.cos(), angles.sin(), norm_eps=1e-3, rope_style=style)
    wanted = rotate(torch.nn.functional.layer_norm(x, (16,), weight, bias, 1e-3), angles, style)
    torch.testing.assert_close(torch.stack([keys[0, :3], keys[1, [3, 2, 1]]]), wanted, rtol=1e-5, atol=1e-6)
    latent, rope = torch.zeros(2, 4, 16), torch.zeros(2, 4, 8)
    LATENT(latent, rope, x, x[..., :8], positions, angles.cos(), angles.sin(), rope_style=style)
    assert torch.equal(torch.stack([latent[0, :3], latent[1, [3, 2, 1]]]), x)
    torch.testing.assert_close(rope[0, :3], rotate(x[0, :, :8], angles[0], style), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rope_style": "half"}, "want one of none, half_split, interleaved, deinterleaved"),
        ({"rope_style": "half_split"}, "give cos and sin with a rope_style"),
        ({"cos": torch.ones(1, 2, 2), "sin": torch.ones(1, 2, 2)}, "give cos and sin with a rope_style"),
        ({"rope_style": "interleaved", "cos": torch.ones(1, 2, 2), "sin": torch.ones(1, 2, 1)}, "sin is"),
        ({"rope_style": "interleaved", "cos": torch.ones(1, 2, 3), "sin": torch.ones(1, 2, 3)}, "is for 6 dims"),
        ({"norm_bias": torch.ones(4)}, "norm_bias without norm_weight"),
        ({"norm_weight": torch.ones(3)}, "norm_weight is"),
    ],
)
def test_arguments_that_do_not_fit(change, message):
    def meta(x):
        return x.to("meta") if isinstance(x, torch.Tensor) else x

    keys, values = torch.zeros(1, 4, 4, device="meta"), torch.zeros(1, 2, 4, device="meta")
    positions = torch.zeros(1, 2, dtype=torch.int64, device="meta")
    with pytest.raises(ValueError, match=message):
        KEYS(keys, values, positions, **{name: meta(value) for name, value in change.items()})


def test_a_latent_row_turns_as_a_whole():
    latent, rope = torch.zeros(1, 4, 6, device="meta"), torch.zeros(1, 4, 4, device="meta")
    angles = torch.ones(1, 1, 1, device="meta")
    with pytest.raises(ValueError, match="is for 2 dims, the row has 4"):
        LATENT(
            latent, rope, latent[:, :1], rope[:, :1], torch.zeros(1, 1, dtype=torch.int64, device="meta"),
            angles, angles, rope_style="half_split",
        )  # fmt: skip
