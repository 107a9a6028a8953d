"""Quantised caches: bytes as the published formats have them, read and written through the operators."""

import pytest
import torch

from kimigraph.codegen.reference_writer import reference_text
from kimigraph.ir.descriptors import IndexKeyDescriptor, LatentDescriptor
from kimigraph.ir.errors import CompileError

OPS = torch.ops.kimigraph
FLASHMLA = LatentDescriptor(
    "paged", "float8_e4m3fn", 512, 64, page_size=64, buffers=1, tile=128, order="scales_rope", scales="power2"
)
ASCEND = LatentDescriptor(
    "paged", "float8_e4m3fn", 512, 64, page_size=64, buffers=1, tile=128, order="rope_scales", scales="amax"
)
KEYS = IndexKeyDescriptor("paged", "float8_e4m3fn", 128, page_size=64, scales="power2")


def test_rows_have_the_published_sizes():
    assert FLASHMLA.row == ASCEND.row == 656 and KEYS.row == 132
    text = "index_key{layout=paged,dtype=float8_e4m3fn,width=128,page_size=64,scales=power2}"
    assert str(KEYS) == text


@pytest.mark.parametrize(("form", "scales_at", "rope_at"), [(FLASHMLA, 512, 528), (ASCEND, 640, 512)])
def test_latent_row_byte_by_byte(form, scales_at, rope_at):
    latent = torch.zeros(2, 64, 656, dtype=torch.uint8)
    table = torch.tensor([[1, 0]], dtype=torch.int32)
    values, rope = torch.randn(1, 1, 512), torch.randn(1, 1, 64)
    values[0, 0, 128:256] *= 50
    OPS.latent_write(latent, None, values, rope, torch.tensor([[3]]), block_table=table, descriptor=str(form))
    row = latent[1, 3]
    assert latent.flatten(0, 1).any(-1).sum() == 1
    assert torch.equal(row[rope_at : rope_at + 128].view(torch.bfloat16), rope[0, 0].bfloat16())
    scales = row[scales_at : scales_at + 16].clone().view(torch.float32)
    tiles = values[0, 0].reshape(4, 128)
    exact = tiles.abs().amax(1) / 448
    if form is ASCEND:
        assert torch.equal(scales, exact)
    else:
        assert torch.equal(scales, torch.exp2(torch.log2(exact).ceil()))
    stored = row[:512].view(torch.float8_e4m3fn).float().reshape(4, 128)
    assert (stored * scales[:, None] - tiles).abs().max() <= tiles.abs().max() / 16
    assert torch.equal(stored, (tiles / scales[:, None]).to(torch.float8_e4m3fn).float())


def test_index_key_page_is_planar():
    pages = torch.zeros(3, 64, 132, dtype=torch.uint8)
    table = torch.tensor([[2, 0]], dtype=torch.int32)
    values = torch.randn(1, 2, 128)
    OPS.index_key_write(pages, values, torch.tensor([[5, 64]]), block_table=table, descriptor=str(KEYS))
    for page, slot, value in ((2, 5, values[0, 0]), (0, 0, values[0, 1])):
        flat = pages[page].flatten()
        scale = flat[8192 + 4 * slot : 8192 + 4 * slot + 4].clone().view(torch.float32)
        assert torch.equal(scale, torch.exp2(torch.log2(value.abs().max() / 448).ceil()).reshape(1))
        stored = flat[128 * slot : 128 * slot + 128].view(torch.float8_e4m3fn)
        assert torch.equal(stored, (value / scale).to(torch.float8_e4m3fn))


@pytest.mark.parametrize("form", [FLASHMLA, ASCEND])
def test_readers_see_what_writers_stored(form):
    generator = torch.Generator().manual_seed(1)
    latent, keys = torch.zeros(4, 64, 656, dtype=torch.uint8), torch.zeros(4, 64, 132, dtype=torch.uint8)
    table = torch.tensor([[3, 0, 1]], dtype=torch.int32)
    values, rope, key = (torch.randn(1, 150, width, generator=generator) for width in (512, 64, 128))
    positions = torch.arange(150).unsqueeze(0)
    OPS.latent_write(latent, None, values, rope, positions, block_table=table, descriptor=str(form))
    OPS.index_key_write(keys, key, positions, block_table=table, descriptor=str(KEYS))
    q, weights = torch.randn(1, 1, 4, 128, generator=generator), torch.randn(1, 1, 4, generator=generator)
    lengths = torch.tensor([150])
    picks = OPS.lightning_indexer(q, keys, weights, lengths, k=20, scale=0.1, block_table=table, descriptor=str(KEYS))
    wanted = OPS.lightning_indexer(q, key, weights, k=20, scale=0.1)
    assert len(set(picks.flatten().tolist()) & set(wanted.flatten().tolist())) >= 18
    q_latent, q_rope = torch.randn(1, 1, 4, 512, generator=generator), torch.randn(1, 1, 4, 64, generator=generator)
    out, lse = OPS.sparse_attention(
        q_latent, q_rope, latent, None, picks, scale=0.05, block_table=table, descriptor=str(form)
    )
    exact, exact_lse = OPS.sparse_attention(q_latent, q_rope, values, rope, picks, scale=0.05)
    assert (out - exact).norm() / exact.norm() < 0.05 and (lse - exact_lse).abs().max() < 0.05


def test_one_plain_buffer():
    form = str(LatentDescriptor("contiguous", "bfloat16", 8, 4, buffers=1))
    latent = torch.zeros(1, 6, 12, dtype=torch.bfloat16)
    values, rope = torch.randn(1, 2, 8), torch.randn(1, 2, 4)
    OPS.latent_write(latent, None, values, rope, torch.tensor([[4, 1]]), descriptor=form)
    assert torch.equal(latent[0, [4, 1]], torch.cat([values, rope], -1)[0].bfloat16())
    q_latent, q_rope, picks = torch.randn(1, 1, 3, 8), torch.randn(1, 1, 3, 4), torch.tensor([[[1, 4, -1]]])
    ours = OPS.sparse_attention(q_latent, q_rope, latent, None, picks, scale=0.3, descriptor=form)
    split = OPS.sparse_attention(q_latent, q_rope, latent[..., :8], latent[..., 8:], picks, scale=0.3)
    assert all(torch.equal(a, b) for a, b in zip(ours, split, strict=True))


def test_bytes_without_a_descriptor_are_refused():
    keys = torch.zeros(2, 64, 132, dtype=torch.uint8, device="meta")
    q, weights = torch.zeros(1, 1, 2, 128, device="meta"), torch.zeros(1, 1, 2, device="meta")
    table = torch.zeros(1, 2, dtype=torch.int32, device="meta")
    with pytest.raises(ValueError, match="want a descriptor of keys of 128, not ''"):
        OPS.lightning_indexer(q, keys, weights, k=1, scale=1.0, block_table=table)
    latent = torch.zeros(2, 64, 656, dtype=torch.uint8, device="meta")
    operands = (
        torch.zeros(1, 1, 2, 512, device="meta"),
        torch.zeros(1, 1, 2, 32, device="meta"),
        latent,
        None,
        table[None],
    )
    with pytest.raises(ValueError, match=r"operands of 512 \+ 32 columns do not fit the cache latent{"):
        OPS.sparse_attention(*operands, scale=1.0, block_table=table, descriptor=str(FLASHMLA))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tile": 100}, "tile must divide width"),
        ({"order": "rope"}, "order must be one of scales_rope, rope_scales"),
        ({"buffers": 2}, "a quantised row holds its rope part"),
        ({"dtype": "bfloat16"}, "scales belongs to float8_e4m3fn caches"),
        ({"scales": None}, "scales must be one of power2, amax"),
    ],
)
def test_descriptors_that_contradict_themselves(change, message):
    fields = {"layout": "paged", "dtype": "float8_e4m3fn", "width": 512, "rope_dim": 64, "page_size": 64, "buffers": 1}
    with pytest.raises(CompileError, match=message):
        LatentDescriptor(**{**fields, "tile": 128, "order": "scales_rope", "scales": "power2", **change})


def test_the_text_of_the_references_stands_alone():
    text = reference_text(["latent_write", "sparse_attention", "lightning_indexer", "index_key_write"])
    assert "kimigraph" not in text.replace("kimigraph.ir.operators", "") and text.count("def quantise") == 1
    exec(compile(text, "reference.py", "exec"), {})
