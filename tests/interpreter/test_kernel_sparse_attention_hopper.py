"""The attention kernel of one launch: caches of every layout, programs that share a list, rows that do not exist."""

import pytest
import torch

from kimigraph.ir.descriptors import LatentDescriptor
from kimigraph.ir.reference.latent_write import latent_write
from kimigraph.ir.reference.sparse_attention import sparse_attention as reference

OPERANDS = ("q_latent", "q_rope", "latent", "rope", "indices", "block_table")


def cache_of(layout, generator, batch, total, paged):
    """A filled cache of one layout, NaN or 0xFF where nothing was written; one page is unmapped."""
    values, turns = (torch.randn(batch, total, width, generator=generator) for width in (512, 64))
    table = None
    shape = (batch, total)
    if paged:
        count = batch * total // 64
        table, shape = torch.randperm(count + 1, generator=generator)[:count].int().view(batch, -1), (count + 1, 64)
    place = ("paged", 64) if paged else ("contiguous", 0)
    rope, descriptor = None, ""
    if layout == "two buffers":
        latent, rope = (torch.full((*shape, width), torch.nan).bfloat16() for width in (512, 64))
    elif layout == "one buffer":
        descriptor = str(LatentDescriptor(place[0], "bfloat16", 512, 64, place[1], 1))
        latent = torch.full((*shape, 576), torch.nan).bfloat16()
    else:
        descriptor = str(LatentDescriptor(place[0], "float8_e4m3fn", 512, 64, place[1], 1, 128, layout, "amax"))
        latent = torch.full((*shape, 656), 255, dtype=torch.uint8)
    positions = torch.arange(total - 10).expand(batch, -1)
    latent_write(
        latent, rope, values[:, :-10], turns[:, :-10], positions, block_table=table, descriptor=descriptor
    )  # fmt: skip
    if table is not None:
        table[0, 1] = -1
    return latent, rope, table, descriptor


def run(kernel, device, layout, batch, tokens, heads, picks, paged, programs):
    generator = torch.Generator().manual_seed(heads + picks)
    total = 256
    latent, rope, table, descriptor = cache_of(layout, generator, batch, total, paged)
    q_latent, q_rope = (torch.randn(batch, tokens, heads, width, generator=generator).bfloat16() for width in (512, 64))
    indices = torch.randint(-40, total - 10, (batch, tokens, picks), generator=generator).int()
    indices[-1, -1] = -1
    indices[0, 0, :2] = torch.tensor([total, 2**30])
    operands = (q_latent, q_rope, latent, rope, indices, table)
    wide = [t.float() if t is not None and t.dtype == torch.bfloat16 else t for t in operands[:5]]
    wanted, wanted_lse = reference(*wide, scale=0.05, block_table=table, descriptor=descriptor)
    operands = tuple(None if tensor is None else tensor.to(device) for tensor in operands)
    attributes = {"scale": 0.05, "descriptor": descriptor}
    options = {} if programs is None else {"programs": programs}
    module = kernel("sparse_attention", dict(zip(OPERANDS, operands, strict=True)), attributes, **options)
    assert hasattr(module, "attend_and_join") == (programs is not None)
    out, lse = (tensor.cpu() for tensor in module.launch(*operands))
    if device != "cpu":
        assert all(torch.equal(a, b.cpu()) for a, b in zip((out, lse), module.launch(*operands), strict=True))
    empty = wanted_lse.isneginf()
    assert torch.equal(lse.isneginf(), empty) and out[empty].count_nonzero() == 0
    assert (out.float() - wanted).norm() <= 4e-3 * wanted.norm()
    assert (lse - wanted_lse)[~empty].abs().max() < (1e-5 if device == "cpu" else 2e-3)


@pytest.mark.parametrize(
    ("layout", "batch", "tokens", "heads", "picks", "paged"),
    [
        ("scales_rope", 2, 1, 20, 96, True),
        ("rope_scales", 1, 2, 70, 100, True),
        ("one buffer", 2, 1, 64, 100, False),
        ("two buffers", 2, 1, 64, 64, True),
        ("scales_rope", 2, 1, 64, 64, False),
    ],
)
@pytest.mark.parametrize("programs", [None, 1, 4])
def test_layouts(kernel, device, layout, batch, tokens, heads, picks, paged, programs):
    run(kernel, device, layout, batch, tokens, heads, picks, paged, programs)
