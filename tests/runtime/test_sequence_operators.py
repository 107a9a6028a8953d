"""What the cache writers put into pages at any place, attention and indexer read back, in every layout."""

import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kimigraph.ir.descriptors import Descriptor, IndexKeyDescriptor, LatentDescriptor
from kimigraph.ir.reference.index_key_write import index_key_write
from kimigraph.ir.reference.latent_write import latent_write
from kimigraph.ir.reference.lightning_indexer import lightning_indexer
from kimigraph.ir.reference.sparse_attention import sparse_attention
from kimigraph.runtime.sequence import PagedCache, SequenceHandle, SequencePool, StatePool

FORMS = {
    "bf16, rope apart, pages of 4": (
        LatentDescriptor("paged", "bfloat16", 32, 8, 4),
        IndexKeyDescriptor("paged", "bfloat16", 16, 4),
    ),
    "fp32, one buffer, pages of 8": (
        LatentDescriptor("paged", "float32", 32, 8, 8, 1),
        IndexKeyDescriptor("paged", "float32", 16, 8),
    ),
    "fp8, rows of 656 bytes, planes of 132, pages of 64": (
        LatentDescriptor("paged", "float8_e4m3fn", 512, 64, 64, 1, 128, "scales_rope", "power2"),
        IndexKeyDescriptor("paged", "float8_e4m3fn", 128, 64, "power2"),
    ),
    "fp8, rope before scales, pages of 16": (
        LatentDescriptor("paged", "float8_e4m3fn", 256, 64, 16, 1, 128, "rope_scales", "amax"),
        IndexKeyDescriptor("paged", "float8_e4m3fn", 128, 16, "amax"),
    ),
}
Form = tuple[LatentDescriptor, IndexKeyDescriptor]
PICKS = 6


class Layer:
    """One DSA layer over a pool of debug mode, beside the same layer over a contiguous cache of its own a sequence."""

    def __init__(self, form: Form, columns: int, order: int) -> None:
        self.latent, self.key = form
        self.page = self.latent.page_size
        buffers: dict[str, Descriptor] = {"cache.0.latent": self.latent, "cache.0.index_key": self.key}
        if self.latent.buffers == 2:
            buffers["cache.0.rope"] = self.latent
        self.context = columns * self.page
        cache = PagedCache(buffers, 5 * columns, self.context, debug=True)
        random.Random(order).shuffle(cache._counts.free)
        self.pool = SequencePool(cache, StatePool({}, 8))
        self.batch = self.pool.batch(3)
        self.plain: dict[SequenceHandle, dict[str, Tensor]] = {}

    def join(self) -> SequenceHandle:
        sequence = self.pool.join()
        self.plain[sequence] = {
            name: torch.zeros(1, self.context, tensor.shape[-1], dtype=tensor.dtype)
            for name, tensor in self.pool.tensors.items()
        }
        return sequence

    def fork(self, origin: SequenceHandle) -> SequenceHandle:
        sequence = self.pool.fork(origin)
        self.plain[sequence] = {name: tensor.clone() for name, tensor in self.plain[origin].items()}
        return sequence

    def step(self, sequences: list[SequenceHandle], tokens: int, seed: int) -> None:
        """Write that many tokens of each sequence, to pages and contiguously, then read both and compare."""
        self.pool.reserve(dict.fromkeys(sequences, tokens))
        self.batch.bind(sequences)
        self.pool.cache.check_table(self.batch.block_table)
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        rows = self.batch.rows
        values, rope = normal(rows, tokens, self.latent.width), 10 * normal(rows, tokens, self.latent.rope_dim)
        # Scales that differ from key to key show a reader that takes another layout.
        keys = normal(rows, tokens, self.key.width) * 2.0 ** (torch.arange(tokens).view(1, -1, 1) % 7)
        queries = normal(rows, tokens, 2, self.key.width), normal(rows, tokens, 2)
        attention = normal(rows, tokens, 2, self.latent.width), normal(rows, tokens, 2, self.latent.rope_dim)
        positions = self.batch.lengths.unsqueeze(1) + torch.arange(tokens)
        self._write(self.pool.tensors, values, rope, keys, positions, self.batch.block_table)
        picked, out = self._read(self.pool.tensors, queries, attention, self.batch.lengths, self.batch.block_table)
        for row, sequence in enumerate(sequences):
            one, plain = slice(row, row + 1), self.plain[sequence]
            self._write(plain, values[one], rope[one], keys[one], positions[one], None)
            parts = tuple(part[one] for part in queries), tuple(part[one] for part in attention)
            wanted, wanted_out = self._read(plain, *parts, self.batch.lengths[one], None)
            assert torch.equal(picked[one], wanted)
            torch.testing.assert_close(out[one], wanted_out, rtol=1e-5, atol=1e-6)
        assert bool(out.isfinite().all())  # padded rows, too: free pages hold NaN, the scratch page does not
        self.pool.commit(dict.fromkeys(sequences, tokens))

    def _write(
        self, buffers: dict[str, Tensor], values: Tensor, rope: Tensor, keys: Tensor, at: Tensor, table: Tensor | None
    ) -> None:
        latent, key = self._descriptors(table)
        latent_write(
            buffers["cache.0.latent"], buffers.get("cache.0.rope"), values, rope, at, block_table=table,
            descriptor=str(latent),
        )  # fmt: skip
        index_key_write(buffers["cache.0.index_key"], keys, at, block_table=table, descriptor=str(key))

    def _read(
        self,
        buffers: dict[str, Tensor],
        queries: tuple[Tensor, ...],
        attention: tuple[Tensor, ...],
        lengths: Tensor,
        table: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        latent, key = self._descriptors(table)
        picked = lightning_indexer(
            queries[0], buffers["cache.0.index_key"], queries[1], lengths + 1, k=PICKS, scale=0.1, block_table=table,
            descriptor=str(key),
        )  # fmt: skip
        out, _ = sparse_attention(
            attention[0], attention[1], buffers["cache.0.latent"], buffers.get("cache.0.rope"), picked, scale=0.1,
            block_table=table, descriptor=str(latent),
        )  # fmt: skip
        return picked, out

    def _descriptors(self, table: Tensor | None) -> Form:
        if table is not None:
            return self.latent, self.key
        return (
            replace(self.latent, layout="contiguous", page_size=0),
            replace(self.key, layout="contiguous", page_size=0),
        )


@pytest.mark.parametrize("order", range(3))
@pytest.mark.parametrize("form", FORMS)
def test_pages_anywhere_read_as_a_contiguous_cache(form: str, order: int) -> None:
    layer = Layer(FORMS[form], columns=3, order=order)
    page = layer.page
    first, second, third = layer.join(), layer.join(), layer.join()
    layer.step([first, second], page - 1, 1)
    layer.step([third], page + 1, 2)
    layer.step([second, third, first], 3, 3)
    layer.pool.leave(first)
    fourth = layer.join()
    layer.step([third, fourth], page // 2, 4)
    layer.step([fourth, second], page, 5)
    pages = [page for sequence in (second, third, fourth) for page in sequence.table.pages]
    assert len(set(pages)) == len(pages)
    assert pages != sorted(pages)


@pytest.mark.parametrize("form", FORMS)
def test_a_fork_diverges_within_a_page_and_a_truncated_sequence_writes_again(form: str) -> None:
    layer = Layer(FORMS[form], columns=3, order=7)
    first = layer.join()
    layer.step([first], layer.page + 2, 1)
    second = layer.fork(first)
    third = layer.fork(second)
    assert layer.pool.cache.free_pages == 13
    layer.step([second, first, third], 1, 2)
    assert layer.pool.cache.free_pages == 11
    assert second.table.pages[0] == first.table.pages[0] == third.table.pages[0]
    layer.pool.truncate(third, layer.page - 1)
    layer.step([first, third], 2, 3)
    layer.pool.leave(first)
    layer.step([third, second], 2, 4)
