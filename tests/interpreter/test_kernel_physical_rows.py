"""Indexer and attention over pages with one address translation: rows that the one lists are what the other reads."""

import pytest
import torch

from kimigraph.codegen.specialize import BUILDERS
from kimigraph.codegen.specialize import lightning_indexer_prefill as prefill
from kimigraph.ir.descriptors import LatentDescriptor
from kimigraph.ir.reference.lightning_indexer import lightning_indexer
from kimigraph.ir.reference.sparse_attention import sparse_attention

INDEXER = ("q", "keys", "weights", "lengths", "mask", "block_table")
ATTENTION = ("q_latent", "q_rope", "latent", "rope", "indices", "block_table", "sink")


def pair(device, batch=2, tokens=3, pages=5, page=64, width=128, k=70):
    """Operands of an indexer and of an attention over pages of one table, one of them unmapped."""
    generator = torch.Generator().manual_seed(0)

    def whole(*shape, span=3):
        return torch.randint(-span, span + 1, shape, generator=generator).bfloat16().to(device)

    table = torch.randperm(batch * pages + 2, generator=generator)[: batch * pages].to(torch.int32).view(batch, pages)
    table[0, 1] = -1
    lengths = torch.tensor([page * pages - 5, 9][:batch], dtype=torch.int32, device=device)
    indexer = (
        whole(batch, tokens, 16, width), whole(batch * pages + 2, page, width), whole(batch, tokens, 16), lengths, None,
        table.to(device),
    )  # fmt: skip
    attention = (
        whole(batch, tokens, 4, 32), whole(batch, tokens, 4, 16), whole(batch * pages + 2, page, 32),
        whole(batch * pages + 2, page, 16),
    )  # fmt: skip
    return indexer, attention, k


def listed_rows(positions, table, page):
    """Rows of the flattened pages."""
    pages = (
        table.long().unsqueeze(1).expand(-1, positions.shape[1], -1).gather(-1, positions.clamp_min(0).long() // page)
    )
    return torch.where(positions < 0, -1, pages * page + positions % page).int()


@pytest.mark.parametrize("form", ["plain", "prefill"])
@pytest.mark.parametrize("k", [70, 400])
def test_the_indexer_lists_rows(kernel, device, monkeypatch, form, k):
    indexer, _, _ = pair(device)
    if form == "prefill":
        monkeypatch.setitem(BUILDERS, "lightning_indexer", lambda request: prefill.build(request, GROUP=64, CHUNK=64))
    attributes = {"k": k, "scale": 0.5, "descriptor": "", "rows": True}
    module = kernel("lightning_indexer", dict(zip(INDEXER, indexer, strict=True)), attributes)
    assert hasattr(module, "index_rows") == (form == "prefill")
    q, keys, weights, lengths, mask, table = (None if x is None else x.cpu() for x in indexer)
    positions = lightning_indexer(q, keys, weights, lengths, mask, k=k, scale=0.5, block_table=table)
    wanted = lightning_indexer(q, keys, weights, lengths, mask, k=k, scale=0.5, block_table=table, rows=True)
    assert torch.equal(wanted, listed_rows(positions, table, 64)) and (wanted != positions).any()
    assert torch.equal(module.launch(*indexer).cpu(), wanted)


@pytest.mark.parametrize("buffers", [1, 2])
def test_the_attention_reads_rows(kernel, device, buffers):
    indexer, (q_latent, q_rope, latent, rope), k = pair(device)
    q, keys, weights, lengths, mask, table = indexer
    descriptor = ""
    if buffers == 1:
        latent, rope = torch.cat([latent, rope], -1), None
        descriptor = str(LatentDescriptor("paged", "bfloat16", 32, 16, 64, 1))
    options = {"k": k, "scale": 0.5, "block_table": table}
    positions = lightning_indexer(q, keys, weights, lengths, mask, **options)
    rows = lightning_indexer(q, keys, weights, lengths, mask, rows=True, **options)
    given = {"scale": 0.1, "descriptor": descriptor}
    wanted, wanted_lse = sparse_attention(q_latent, q_rope, latent, rope, positions, block_table=table, **given)
    out, lse = sparse_attention(q_latent, q_rope, latent, rope, rows, rows=True, **given)
    assert torch.equal(out, wanted) and torch.equal(lse, wanted_lse)
    operands = (q_latent, q_rope, latent, rope, rows, None, None)
    module = kernel("sparse_attention", dict(zip(ATTENTION, operands, strict=True)), {**given, "rows": True})
    found, found_lse = module.launch(*operands)
    torch.testing.assert_close(found.float(), wanted.float(), rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(found_lse, wanted_lse, rtol=1e-3, atol=1e-3)


def test_rows_need_pages():
    operands = [torch.zeros(1, 1, 2, 4, device="meta"), torch.zeros(1, 8, 4, device="meta")]
    with pytest.raises(ValueError, match="rows are those of pages"):
        torch.ops.kimigraph.lightning_indexer(*operands, operands[0][..., 0], k=2, scale=1.0, rows=True)
