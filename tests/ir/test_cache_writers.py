import pytest
import torch

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
