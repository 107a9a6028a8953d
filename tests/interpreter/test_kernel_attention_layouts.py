"""The attention kernels over caches of every layout: listed rows and all visible ones, sinks, rows that do not exist.

On a GPU of compute capability 9.0 the form for 512 + 64 columns by specialised warps serves all but the last test.
"""

import math

import pytest
import torch

from kimigraph.ir.descriptors import LatentDescriptor
from kimigraph.ir.reference.latent_attention import latent_attention
from kimigraph.ir.reference.latent_write import latent_write
from kimigraph.ir.reference.sparse_attention import sparse_attention

TOTAL, HELD = 128, 118
LAYOUTS = ("scales_rope", "rope_scales", "one buffer", "two buffers")


def cache_of(layout, generator, batch, paged):
    """A cache filled up to HELD rows, NaN or 0xFF where nothing was written; one page is unmapped."""
    values, turns = (torch.randn(batch, HELD, width, generator=generator) for width in (512, 64))
    table = None
    shape = (batch, TOTAL)
    if paged:
        count = batch * TOTAL // 64
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
    positions = torch.arange(HELD).expand(batch, -1)
    latent_write(latent, rope, values, turns, positions, block_table=table, descriptor=descriptor)
    if table is not None:
        table[0, 1] = -1
    return latent, rope, table, descriptor


def on(device, tensor):
    return None if tensor is None else tensor.to(device)


def check(kernel, device, op, tensors, descriptor, options):
    """The kernel of ``op`` against its fp32 reference on the same cache; two calls agree to the bit."""
    reference = {"sparse_attention": sparse_attention, "latent_attention": latent_attention}[op]
    wide = {n: t.float() if t is not None and t.dtype == torch.bfloat16 else t for n, t in tensors.items()}
    wanted, wanted_lse = reference(**wide, scale=0.05, descriptor=descriptor)
    placed = {name: on(device, tensor) for name, tensor in tensors.items()}
    module = kernel(op, placed, {"scale": 0.05, "descriptor": descriptor}, target=device, **options)
    out, lse = module.launch(*placed.values())
    assert all(torch.equal(a, b) for a, b in zip((out, lse), module.launch(*placed.values()), strict=True))
    out, lse = out.cpu(), lse.cpu()
    empty = wanted_lse.isneginf()
    assert torch.equal(lse.isneginf(), empty) and out[empty].count_nonzero() == 0
    assert (out.float() - wanted).norm() <= 4e-3 * wanted.norm()
    assert (lse - wanted_lse)[~empty].abs().max() < (1e-5 if device == "cpu" else 8e-3)


def share(device, programs):
    """How many programs attend to one query, in the words of the form that serves on the device."""
    return {} if programs is None else {"splits" if device == "cpu" else "programs": programs}


def queries(generator, batch, tokens, heads):
    return (torch.randn(batch, tokens, heads, width, generator=generator).bfloat16() for width in (512, 64))


@pytest.mark.parametrize(
    ("layout", "batch", "tokens", "heads", "picks", "paged", "programs"),
    [
        ("scales_rope", 2, 1, 20, 96, True, None),
        ("scales_rope", 1, 1, 20, 128, True, 4),
        ("scales_rope", 1, 2, 64, 64, False, 1),
        ("rope_scales", 1, 2, 70, 100, True, 2),
        ("one buffer", 2, 1, 64, 100, False, None),
        ("one buffer", 1, 1, 128, 190, True, 1),
        ("two buffers", 2, 1, 20, 64, True, 2),
    ],
)
def test_listed_rows(kernel, device, layout, batch, tokens, heads, picks, paged, programs):
    """Lists in any order with -1 and what lies beyond the cache in them; one of several names nothing."""
    generator = torch.Generator().manual_seed(heads + picks)
    latent, rope, table, descriptor = cache_of(layout, generator, batch, paged)
    q_latent, q_rope = queries(generator, batch, tokens, heads)
    indices = torch.randint(-40, HELD, (batch, tokens, picks), generator=generator).int()
    if batch * tokens > 1:
        indices[-1, -1] = -1
    indices[0, 0, :2] = torch.tensor([TOTAL, 2**30])
    sink = torch.randn(heads, generator=generator) if programs != 1 else None
    tensors = {"q_latent": q_latent, "q_rope": q_rope, "latent": latent, "rope": rope, "indices": indices}
    tensors |= {"block_table": table, "sink": sink}
    check(kernel, device, "sparse_attention", tensors, descriptor, share(device, programs))


@pytest.mark.parametrize(
    ("layout", "paged", "programs"),
    [
        *((layout, paged, None) for layout in LAYOUTS for paged in (True, False)),
        ("scales_rope", True, 2),
        ("two buffers", False, 1),
    ],
)
def test_all_visible_rows(kernel, device, layout, paged, programs):
    """Each sequence its own length, the last one none for its first query: the half-written page is not read."""
    generator = torch.Generator().manual_seed(len(layout) + paged)
    batch, tokens, heads = 2, 2, 17
    latent, rope, table, descriptor = cache_of(layout, generator, batch, paged)
    q_latent, q_rope = queries(generator, batch, tokens, heads)
    lengths = torch.tensor([HELD - 1, 0], dtype=torch.int32)
    sink = torch.randn(heads, generator=generator) if programs != 1 else None
    tensors = {"q_latent": q_latent, "q_rope": q_rope, "latent": latent, "rope": rope, "lengths": lengths}
    tensors |= {"block_table": table, "sink": sink}
    check(kernel, device, "latent_attention", tensors, descriptor, share(device, programs))


@pytest.mark.parametrize("lengths", [None, 17])
def test_one_length_for_all(kernel, device, lengths):
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(2, 50, 40, generator=generator)
    tensors = {
        "q_latent": torch.randn(2, 3, 5, 24, generator=generator),
        "q_rope": torch.randn(2, 3, 5, 16, generator=generator),
        "latent": rows[..., :24],
        "rope": rows[..., 24:],
        "lengths": None if lengths is None else torch.tensor(lengths),
        "block_table": None,
        "sink": None,
    }
    check(kernel, device, "latent_attention", tensors, "", {})


@pytest.mark.parametrize("value", [-math.inf, math.inf])
def test_endless_sinks(kernel, device, value):
    """A sink of -inf takes nothing, one of +inf all."""
    generator = torch.Generator().manual_seed(2)
    tensors = {
        "q_latent": torch.randn(1, 1, 2, 16, generator=generator),
        "q_rope": None,
        "latent": torch.randn(1, 64, 16, generator=generator),
        "rope": None,
        "indices": torch.arange(64, dtype=torch.int32).view(1, 1, 64),
        "block_table": None,
        "sink": torch.full((2,), value),
    }
    check(kernel, device, "sparse_attention", tensors, "", {"splits": 2} if device == "cpu" else {})
