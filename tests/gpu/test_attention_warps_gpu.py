"""Attention by specialised warps at full width: prefill, far pages, lists with repeats, replays of a captured graph."""

import importlib.util
from pathlib import Path

import pytest
import torch

from kimigraph.ir.descriptors import LatentDescriptor
from kimigraph.ir.reference.latent_attention import latent_attention
from kimigraph.ir.reference.sparse_attention import sparse_attention

pytestmark = pytest.mark.gpu

_PATH = Path(__file__).parents[1] / "interpreter" / "test_kernel_attention_layouts.py"
_SPEC = importlib.util.spec_from_file_location("attention_layouts", _PATH)
assert _SPEC is not None and _SPEC.loader is not None
CASES = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(CASES)


def packed_rows(*shape):
    """Bytes of 656 columns: e4m3, four scales, 64 of bf16."""
    rows = torch.empty(*shape, 656, dtype=torch.uint8, device="cuda")
    fill(rows)
    return rows


def fill(rows):
    shape = rows.shape[:-1]
    rows[..., :512] = torch.randn(*shape, 512, device="cuda").to(torch.float8_e4m3fn).view(torch.uint8)
    rows[..., 512:528] = (torch.rand(*shape, 4, device="cuda") * 0.05 + 0.02).view(torch.uint8)
    rows[..., 528:] = torch.randn(*shape, 64, device="cuda").bfloat16().view(torch.uint8)


def form(paged):
    place = ("paged", 64) if paged else ("contiguous", 0)
    return str(LatentDescriptor(place[0], "float8_e4m3fn", 512, 64, place[1], 1, 128, "scales_rope", "power2"))


def gaussian(*shape):
    return torch.randn(*shape, device="cuda").bfloat16()


def compare(kernel, op, tensors, descriptor, **options):
    """Kernel and fp32 reference on the same bytes; returns the kernel's module."""
    reference = {"sparse_attention": sparse_attention, "latent_attention": latent_attention}[op]
    wide = {n: t.float() if t is not None and t.dtype == torch.bfloat16 else t for n, t in tensors.items()}
    wanted, wanted_lse = reference(**wide, scale=0.05, descriptor=descriptor)
    module = kernel(op, tensors, {"scale": 0.05, "descriptor": descriptor}, target="cuda", **options)
    out, lse = module.launch(*tensors.values())
    assert (out.float() - wanted).norm() <= 4e-3 * wanted.norm()
    seen = ~wanted_lse.isneginf()
    assert torch.equal(lse.isneginf(), ~seen) and (lse - wanted_lse)[seen].abs().max() < 8e-3
    return module


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.mark.parametrize("heads", [17, 64, 128])
def test_prefill_over_permuted_pages(kernel, heads):
    """Each query its own unsorted list with -1 in it; pages that are nobody's hold NaN."""
    batch, tokens, picks, total = 2, 40, 500, 1024
    pages = torch.full((2 * batch * total // 64, 64, 656), 255, dtype=torch.uint8, device="cuda")
    table = torch.randperm(len(pages), device="cuda")[: batch * total // 64].int().view(batch, -1)
    pages[table.long()] = packed_rows(batch, total // 64, 64)
    indices = torch.stack([torch.randperm(total, device="cuda")[:picks] for _ in range(batch * tokens)])
    indices = indices.int().view(batch, tokens, picks)
    indices[torch.rand(indices.shape, device="cuda") < 0.1] = -1
    tensors = {"q_latent": gaussian(batch, tokens, heads, 512), "q_rope": gaussian(batch, tokens, heads, 64)}
    tensors |= {"latent": pages, "rope": None, "indices": indices, "block_table": table}
    tensors["sink"] = torch.randn(heads, device="cuda")
    assert "specialised warps" in compare(kernel, "sparse_attention", tensors, form(True)).CONSTANTS["route"]


@pytest.mark.parametrize("packed", [True, False])
def test_pages_past_32_bit_offsets(kernel, packed):
    width, dtype = (656, torch.uint8) if packed else (576, torch.bfloat16)
    stride = 2**31 // 3 // 16 * 16 + 16 * width
    pool = torch.empty(3 * stride + 64 * width, dtype=dtype, device="cuda")
    pages = pool.as_strided((4, 64, width), (stride, width, 1))
    if packed:
        fill(pages)
    else:
        pages.normal_()
    descriptor = form(True) if packed else str(LatentDescriptor("paged", "bfloat16", 512, 64, 64, 1))
    tensors = {"q_latent": gaussian(1, 1, 64, 512), "q_rope": gaussian(1, 1, 64, 64), "latent": pages, "rope": None}
    lengths = torch.tensor([190], dtype=torch.int32, device="cuda")
    table = torch.tensor([[3, 0, 2]], dtype=torch.int32, device="cuda")
    near = {**tensors, "latent": pages[table[0].long()].contiguous()}
    order = torch.arange(3, dtype=torch.int32, device="cuda").view(1, 3)
    rest = {"lengths": lengths, "block_table": table, "sink": None}
    far = compare(kernel, "latent_attention", near | rest | {"block_table": order}, descriptor)
    out, lse = far.launch(*(near | rest | {"block_table": order}).values())
    module = kernel("latent_attention", tensors | rest, {"scale": 0.05, "descriptor": descriptor}, target="cuda")
    assert all(torch.equal(a, b) for a, b in zip((out, lse), module.launch(*(tensors | rest).values()), strict=True))


def test_a_row_that_stands_twice_counts_twice(kernel):
    rows = packed_rows(1, 300)
    indices = torch.randint(0, 20, (1, 1, 2048), device="cuda").int()
    tensors = {"q_latent": gaussian(1, 1, 128, 512), "q_rope": gaussian(1, 1, 128, 64), "latent": rows, "rope": None}
    compare(kernel, "sparse_attention", tensors | {"indices": indices, "block_table": None, "sink": None}, form(False))


@pytest.mark.parametrize("batch", [1, 8])
def test_replays_agree_to_the_bit(kernel, batch):
    """Programs meet again in every replay; a second stream's work disturbs their order."""
    rows = packed_rows(batch, 4096)
    indices = torch.stack([torch.randperm(4096, device="cuda")[:2048] for _ in range(batch)]).int().view(batch, 1, -1)
    tensors = {"q_latent": gaussian(batch, 1, 64, 512), "q_rope": gaussian(batch, 1, 64, 64), "latent": rows}
    tensors |= {"rope": None, "indices": indices, "block_table": None, "sink": None}
    module = compare(kernel, "sparse_attention", tensors, form(False))
    wanted = module.launch(*tensors.values())
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = module.launch(*tensors.values())
    side = torch.cuda.Stream()
    noise = torch.randn(1 << 20, device="cuda")
    for number in range(500):
        with torch.cuda.stream(side):
            noise[: 1 << (10 + number % 10)].mul_(1.0)
        graph.replay()
        if number % 50 == 0:
            assert all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True))
