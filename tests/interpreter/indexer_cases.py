"""What the tests of the indexer's forms share: operands over packed pages and over a plain cache, and their picks."""

import torch

from kimigraph.ir.descriptors import IndexKeyDescriptor
from kimigraph.ir.reference.lightning_indexer import lightning_indexer as reference

OPERANDS = ("q", "keys", "weights", "lengths", "mask", "block_table")
PAGES = str(IndexKeyDescriptor("paged", "float8_e4m3fn", 128, page_size=64, scales="power2"))


def whole(generator, *shape, span=3):
    """Small integers: every sum is exact, and ties are many."""
    return torch.randint(-span, span + 1, shape, generator=generator).float()


def quantised(generator, batch, tokens, total, heads=16):
    """fp8 queries, shuffled pages with scales of 0.5, 1 and 2, weights, a block table."""
    count = batch * total // 64
    pages = torch.zeros(count + 2, 64 * 132, dtype=torch.uint8)
    pages[:, :8192] = whole(generator, count + 2, 8192).to(torch.float8_e4m3fn).view(torch.uint8)
    scales = torch.tensor([0.5, 1.0, 2.0])[torch.randint(0, 3, (count + 2, 64), generator=generator)]
    pages[:, 8192:] = scales.view(torch.uint8).view(count + 2, 256)
    table = torch.randperm(count + 2, generator=generator)[:count].to(torch.int32).view(batch, -1)
    q = whole(generator, batch, tokens, heads, 128).to(torch.float8_e4m3fn)
    return q, pages.view(-1, 64, 132), whole(generator, batch, tokens, heads, span=2), None, None, table


def plain(generator, batch, tokens, total, heads=16):
    """bf16 queries over one contiguous cache."""
    q, keys = whole(generator, batch, tokens, heads, 128), whole(generator, batch, total, 128)
    return q.bfloat16(), keys.bfloat16(), whole(generator, batch, tokens, heads, span=2), None, None, None


def expected(operands, k):
    q, keys, weights, lengths, mask, table = operands
    descriptor = PAGES if keys.dtype == torch.uint8 else ""
    return reference(
        q, keys, weights, lengths, mask, k=k, scale=0.5, block_table=table, descriptor=descriptor
    )  # fmt: skip
