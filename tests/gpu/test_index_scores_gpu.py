"""The interpreter's cases of ``index_scores`` on the GPU, and what only it can show: full width, 64-bit offsets."""

import importlib.util
import math
from pathlib import Path

import pytest
import torch

from kimigraph.ir.descriptors import IndexKeyDescriptor
from kimigraph.ir.reference.index_scores import index_scores

pytestmark = pytest.mark.gpu

_PATH = Path(__file__).parents[1] / "interpreter" / "test_kernel_index_scores.py"
_SPEC = importlib.util.spec_from_file_location("index_scores_cases", _PATH)
assert _SPEC is not None and _SPEC.loader is not None
CASES = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(CASES)
globals().update({name: test for name, test in vars(CASES).items() if name.startswith("test_")})

PAGES = str(IndexKeyDescriptor("paged", "float8_e4m3fn", 128, page_size=64, scales="power2"))
SCALE = 128**-0.5


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def whole(*shape, span=3):
    """Small integers: every sum is exact."""
    return torch.randint(-span, span + 1, shape, device="cuda").float()


def gaussian(*shape):
    return torch.randn(shape, device="cuda")


def caches(form, numbers, batch, total):
    """Keys, table and descriptor of one form of cache."""
    count = batch * total // 64
    table = torch.randperm(count, device="cuda").to(torch.int32).view(batch, -1)
    if form != "packed":
        keys = numbers(batch, total, 128).to(torch.float32 if form == "fp32" else torch.bfloat16)
        return (keys.view(count, 64, 128), table, "") if form == "paged" else (keys, None, "")
    pages = torch.empty(count, 64 * 132, dtype=torch.uint8, device="cuda")
    pages[:, :8192] = numbers(count, 8192).to(torch.float8_e4m3fn).view(torch.uint8)
    scales = torch.tensor([0.5, 1.0, 2.0], device="cuda")[torch.randint(0, 3, (count, 64), device="cuda")]
    pages[:, 8192:] = scales.view(torch.uint8).view(count, 256)
    return pages.view(count, 64, 132), table, PAGES


def picks_of(batch, tokens, k, total):
    """Ascending, as an indexer lists them: -1 behind the last; some rows have few."""
    picks = torch.rand(batch, tokens, total, device="cuda").topk(k).indices.sort().values
    kept = torch.randint(0, 2 * k, (batch, tokens, 1), device="cuda")
    return picks.where(torch.arange(k, device="cuda") < kept, -1).to(torch.int32)


def run(kernel, q, keys, weights, picks, table, descriptor, scale):
    operands = (q, keys, weights, picks, table, None)
    attributes = {"scale": scale, "quantises_q": False, "descriptor": descriptor}
    module = kernel("index_scores", dict(zip(CASES.OPERANDS, operands, strict=True)), attributes, target="cuda")
    got = module.launch(*operands)
    assert torch.equal(got, module.launch(*operands))
    return got


@pytest.mark.parametrize("form", ["bf16", "fp32", "paged", "packed"])
@pytest.mark.parametrize(("batch", "total", "tokens"), [(1, 32768, 1), (8, 8192, 1), (64, 4096, 1), (2, 4096, 9)])
def test_exact_sums_at_width(kernel, form, batch, total, tokens):
    keys, table, descriptor = caches(form, whole, batch, total)
    q = whole(batch, tokens, 64, 128).to(
        {"packed": torch.float8_e4m3fn, "fp32": torch.float32}.get(form, torch.bfloat16)
    )
    weights, picks = whole(batch, tokens, 64, span=2), picks_of(batch, tokens, 2048, total)
    got = run(kernel, q, keys, weights, picks, table, descriptor, 0.5)
    assert torch.equal(got, index_scores(q, keys, weights, picks, scale=0.5, block_table=table, descriptor=descriptor))


@pytest.mark.parametrize("form", ["bf16", "fp32", "packed"])
def test_gaussian_sums_at_width(kernel, form):
    keys, table, descriptor = caches(form, gaussian, 8, 8192)
    q = gaussian(8, 1, 64, 128).to({"packed": torch.float8_e4m3fn, "fp32": torch.float32}.get(form, torch.bfloat16))
    weights, picks = gaussian(8, 1, 64), picks_of(8, 1, 2048, 8192)
    got = run(kernel, q, keys, weights, picks, table, descriptor, SCALE)
    wanted = index_scores(q, keys, weights, picks, scale=SCALE, block_table=table, descriptor=descriptor)
    assert torch.equal(got == -math.inf, picks < 0)
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5 * float(wanted[picks >= 0].abs().max()))


def test_ties_of_a_row_of_equal_keys(kernel):
    q, weights, picks = gaussian(2, 1, 64, 128).bfloat16(), gaussian(2, 1, 64), picks_of(2, 1, 2048, 4096)
    keys = gaussian(2, 1, 128).bfloat16().expand(2, 4096, 128).contiguous()
    got = run(kernel, q, keys, weights, picks, None, "", SCALE)
    assert all(row[kept].unique().numel() <= 1 for row, kept in zip(got, picks >= 0, strict=True))


@pytest.mark.parametrize("form", ["bf16", "packed"])
def test_keys_beyond_two_to_the_31(kernel, form):
    """Byte and element offsets past 32 bits; only picked rows hold numbers."""
    few, q = 512, whole(1, 1, 64, 128)
    weights = whole(1, 1, 64, span=2)
    if form == "bf16":
        total = 2**31 // 128 + 4096
        keys, table, descriptor = torch.empty(1, total, 128, dtype=torch.bfloat16, device="cuda"), None, ""
        at = torch.cat([torch.arange(few // 2), torch.arange(total - few // 2, total)]).cuda()
        near = whole(1, few, 128).bfloat16()
        keys[:, at] = near
        near_table, q = None, q.bfloat16()
    else:
        count = 2**31 // (64 * 132) + 64
        near, _, descriptor = caches(form, whole, 1, few)
        keys = torch.empty(count, 64, 132, dtype=torch.uint8, device="cuda")
        keys[count - 8 :] = near
        table = torch.arange(count - 8, count, dtype=torch.int32, device="cuda").view(1, 8)
        near_table = torch.arange(8, dtype=torch.int32, device="cuda").view(1, 8)
        at, q = torch.arange(few, device="cuda"), q.to(torch.float8_e4m3fn)
    got = run(kernel, q, keys, weights, at.to(torch.int32).view(1, 1, -1), table, descriptor, 0.5)
    every = torch.arange(few, dtype=torch.int32, device="cuda").view(1, 1, -1)
    assert torch.equal(
        got, index_scores(q, near, weights, every, scale=0.5, block_table=near_table, descriptor=descriptor)
    )
