"""A policy on paged caches: pages become bytes where the model's own operators find them through a block table."""

import pytest
import torch
from torch import nn

import kimigraph
from kimigraph.ir.cache_formats import rounded, unpack
from kimigraph.ir.config import CompileConfig
from kimigraph.ir.descriptors import IndexKeyDescriptor, LatentDescriptor

PAGE, PAGES, BATCH, DIM, WIDTH, LATENT, ROPE, HEADS, PICKS = 8, 9, 2, 48, 32, 64, 16, 4, 12
KEYS = str(IndexKeyDescriptor("paged", "float32", WIDTH, PAGE))
ROWS = str(LatentDescriptor("paged", "float32", LATENT, ROPE, PAGE))


class PagedStep(nn.Module):
    """One sparse attention of a decode step on pages."""

    def __init__(self):
        super().__init__()
        sizes = {"key": WIDTH, "latent": LATENT, "rope": ROPE, "gate": HEADS, "query": HEADS * WIDTH}
        sizes |= {"ask": HEADS * LATENT, "turn": HEADS * ROPE}
        self.products = nn.ModuleDict({name: nn.Linear(DIM, size, bias=False) for name, size in sizes.items()})

    def forward(self, x, lengths, table, cache):
        ops, made = torch.ops.kimigraph, {name: layer(x) for name, layer in self.products.items()}
        positions = lengths.unsqueeze(1).long()
        keys, latent, rope = (cache[f"cache.0.{name}"] for name in ("index_key", "latent", "rope"))
        ops.index_key_write(keys, made["key"], positions, block_table=table, descriptor=KEYS)
        values = made["latent"], made["rope"], positions
        ops.latent_write(latent, rope, *values, block_table=table, descriptor=ROWS)
        q, ask, turn = (made[name].unflatten(-1, (HEADS, -1)) for name in ("query", "ask", "turn"))
        seen = lengths + 1
        picks = ops.lightning_indexer(
            q, keys, made["gate"], seen, k=PICKS, scale=1.0, block_table=table, descriptor=KEYS
        )
        return ops.sparse_attention(ask, turn, latent, rope, picks, scale=0.1, block_table=table, descriptor=ROWS)[0]


def pages():
    widths = {"index_key": WIDTH, "latent": LATENT, "rope": ROPE}
    return {f"cache.0.{name}": torch.zeros(PAGES, PAGE, width) for name, width in widths.items()}


@pytest.fixture(scope="module")
def step():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    return PagedStep().requires_grad_(False)


@pytest.mark.parametrize("policy", ["article", "deepseek"])
def test_pages_of_bytes(step, policy):
    table = torch.randperm(PAGES)[: BATCH * 4].to(torch.int32).view(BATCH, 4)
    lengths = torch.tensor([0, 3], dtype=torch.int32)
    config = CompileConfig(target="cpu:reference", cache="off", report=False, policy=policy)
    program = kimigraph.optimize(step, (torch.randn(BATCH, 1, DIM), lengths, table, pages()), config)
    caches, plain = program.new_caches(), pages()
    assert caches["cache.0.index_key"].shape[:2] == caches["cache.0.latent"].shape[:2] == (PAGES, PAGE)
    assert {cache.dtype for cache in caches.values()} == {torch.uint8} and len(caches) == 2
    assert all("layout=paged" in spec.descriptor for spec in program.cache_spec)
    for _ in range(20):
        x = torch.randn(BATCH, 1, DIM)
        got, want = program(x, lengths, table, caches), step(x, lengths, table, plain)
        # What the pages keep is what the reference quantiser leaves of the plain ones, byte by byte.
        for spec in program.cache_spec:
            kept = rounded(spec, {source: plain[source] for source, _ in spec.parts})
            held = unpack(spec, caches[spec.source])
            assert all(torch.allclose(held[name], kept[name], rtol=1e-5, atol=1e-6) for name in kept)
        if int(lengths.max()) < PICKS:  # all are picked
            assert (got - want).norm() / want.norm() < 0.1
        lengths = lengths + 1
    assert len(program.report().quantization) == 4
