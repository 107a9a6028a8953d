"""Faults that were reported of other engines' indexers, each as its smallest input."""

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import pytest
import torch
from indexer_cases import OPERANDS, PAGES, expected, quantised
from torch import Tensor

from kimigraph.ir.descriptors import IndexKeyDescriptor
from kimigraph.ir.reference.index_key_write import index_key_write
from kimigraph.ir.reference.sparse_attention import sparse_attention

Kernel = Callable[..., ModuleType]
KEY = str(IndexKeyDescriptor("paged", "float8_e4m3fn", 128, 64, "power2"))
LAYERS, PICKS, CONTEXT = 3, 16, 24


def launched(
    kernel: Kernel, device: str, op: str, tensors: Mapping[str, Tensor | None], attributes: dict[str, Any]
) -> Any:
    """What the kernel returns for operands that stay where they are in memory."""
    return kernel(op, tensors, attributes, target=device).launch(*tensors.values())


def test_a12_layers_that_are_slices_of_one_pool_keep_to_their_own_part(kernel: Kernel, device: str) -> None:
    """A slice begins at an offset: whoever drops it reads and writes layer 0 for all layers."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(1, CONTEXT, 128, generator=generator)
    positions, table = torch.arange(CONTEXT).view(1, -1), torch.tensor([[1]], dtype=torch.int32)
    pool = torch.zeros(LAYERS, 2, 64, 132, dtype=torch.uint8, device=device)
    query, _, weights, *_ = quantised(generator, 1, 1, 64)
    lengths = torch.tensor([CONTEXT], dtype=torch.int32)
    found: list[Tensor] = []
    for layer in range(LAYERS):
        own = pool[layer]
        assert own.storage_offset() == layer * own.numel()
        rows = (layer + 1) * values.roll(layer, 1)
        written = {"keys": own, "values": rows.to(device), "positions": positions.to(device)}
        written |= dict.fromkeys(("norm_weight", "norm_bias", "cos", "sin")) | {"block_table": table.to(device)}
        attributes = {"norm_eps": 1e-6, "rope_style": "none", "descriptor": KEY}
        launched(kernel, device, "index_key_write", written, attributes)
        wanted = torch.zeros(2, 64, 132, dtype=torch.uint8)
        index_key_write(wanted, rows, positions, block_table=table, descriptor=KEY)
        assert torch.equal(own.cpu(), wanted) and wanted.count_nonzero() > 0
        found.append(wanted)
    assert all(not torch.equal(found[a], found[b]) for a, b in ((0, 1), (0, 2), (1, 2)))
    picks: list[Tensor] = []
    for layer in range(LAYERS):
        operands = (query, pool[layer], weights, lengths, None, table)
        placed = {name: None if x is None else x.to(device) for name, x in zip(OPERANDS, operands, strict=True)}
        attributes = {"k": PICKS, "scale": 0.5, "descriptor": PAGES}
        picks.append(launched(kernel, device, "lightning_indexer", placed, attributes).cpu())
        assert torch.equal(picks[layer], expected((*operands[:1], found[layer], *operands[2:]), PICKS))
    assert not torch.equal(picks[0], picks[1]) and not torch.equal(picks[0], picks[2])


@pytest.mark.parametrize("batch", [1, 3])
def test_a17_sequences_that_are_all_empty_pick_nothing(kernel: Kernel, device: str, batch: int) -> None:
    """As when a graph is captured before the first prompt: no key counts, no row is read, zeros come out."""
    operands = list(quantised(torch.Generator().manual_seed(1), batch, 1, 128))
    operands[1] = torch.full((2 * batch + 2, 64, 132), 255, dtype=torch.uint8)  # NaN, wherever it is read
    operands[3] = torch.zeros(batch, dtype=torch.int32)
    placed = {name: None if x is None else x.to(device) for name, x in zip(OPERANDS, operands, strict=True)}
    attributes = {"k": PICKS, "scale": 0.5, "descriptor": PAGES}
    picks = launched(kernel, device, "lightning_indexer", placed, attributes)
    assert picks.shape == (batch, 1, PICKS) and bool((picks == -1).all())
    query, turn = torch.randn(batch, 1, 16, 32), torch.randn(batch, 1, 16, 8)
    latent, rope = torch.full((batch, 128, 32), torch.nan), torch.full((batch, 128, 8), torch.nan)
    caches = {"q_latent": query, "q_rope": turn, "latent": latent, "rope": rope}
    moved = {name: tensor.to(device) for name, tensor in caches.items()} | {"indices": picks}
    out, lse = launched(kernel, device, "sparse_attention", moved, {"scale": 0.1, "descriptor": ""})
    _, wanted = sparse_attention(query, turn, latent, rope, picks.cpu(), scale=0.1)
    assert not out.any() and torch.equal(lse.cpu(), wanted) and bool((lse == -torch.inf).all())
