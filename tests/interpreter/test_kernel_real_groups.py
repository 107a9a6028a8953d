"""MXFP8 keys and queries as bf16, as the indexer of many rows on Hopper reads them: number by number."""

import pytest
import torch

from kimigraph.codegen.templates.real_groups import real_keys, real_queries
from kimigraph.ir.descriptors import IndexKeyDescriptor
from kimigraph.ir.reference.cache_bytes import index_key_bytes, index_key_planes, read_index_keys
from kimigraph.ir.reference.mxfp8_quantize import mxfp8_dequantize, mxfp8_quantize


def numbers(*shape):
    """Groups that differ by binades; zeros, an infinity and a NaN among them."""
    generator = torch.Generator().manual_seed(len(shape))
    x = torch.randn(*shape, 4, 32, generator=generator)
    x *= torch.randint(-40, 4, (*shape, 4, 1), generator=generator).float().exp2()
    rows = x.view(-1, 4, 32)
    rows[0, 1], rows[1, 2, 5], rows[2, 0, 7] = 0, float("inf"), float("nan")
    return x.flatten(-2)


@pytest.mark.parametrize("inside", [True, False])
def test_queries(inside):
    q = numbers(3, 16).bfloat16()
    codes, scales = mxfp8_quantize(q, group=32)
    given, powers = (q, None) if inside else (codes, scales)
    found = torch.full((3, 16, 128), 7.0, dtype=torch.bfloat16)
    real_queries[(3,)](
        given, powers, found, H=16, Q_STRIDE=given.stride(), Q_SCALE_STRIDE=(0, 0, 0) if inside else powers.stride()
    )
    torch.testing.assert_close(found.float(), mxfp8_dequantize(codes, scales, group=32), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("paged", [True, False])
def test_keys(paged):
    form = str(IndexKeyDescriptor("paged" if paged else "contiguous", "float8_e4m3fn", 128, 64 * paged, "e8m0", 32))
    cache = torch.zeros(*((4, 64) if paged else (2, 128)), 132, dtype=torch.uint8)
    for plane, part in zip(
        index_key_planes(cache, form), index_key_bytes(numbers(*cache.shape[:2]), form), strict=True
    ):
        plane.copy_(part)
    table = torch.tensor([3, -1], dtype=torch.int32) if paged else None
    found, tiles = torch.full((128, 128), 7.0, dtype=torch.bfloat16), torch.full((2,), 9, dtype=torch.int32)
    real_keys[(2,)](cache, table, found, tiles, 1, TABLE_STRIDE=1 if paged else 0, PLANE=cache.shape[1], PAGED=paged)
    assert tiles.tolist() == ([0, -1] if paged else [0, 1])
    own = read_index_keys(cache, form)
    wanted = own[3] if paged else own[1]
    torch.testing.assert_close(found[: len(wanted)].float(), wanted.float(), rtol=0, atol=0, equal_nan=True)
