"""The sparse attention kernel against the fp32 reference."""

import math

import pytest
import torch
import triton
import triton.language as tl

from kimigraph.codegen.templates.sparse_attention import row_offsets
from kimigraph.ir.reference.sparse_attention import sparse_attention as reference

OPERANDS = ("q_latent", "q_rope", "latent", "rope", "indices", "block_table")
TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 4e-3, torch.float16: 1e-3}  # of the norm


def run(kernel, device, q_latent, q_rope, latent, rope, indices, block_table=None, *, scale=0.2, **options):
    operands = [on(device, tensor) for tensor in (q_latent, q_rope, latent, rope, indices, block_table)]
    attributes = {"scale": scale, "descriptor": ""}
    module = kernel("sparse_attention", dict(zip(OPERANDS, operands, strict=True)), attributes, **options)
    out, lse = module.launch(*operands)
    assert out.dtype == q_latent.dtype and out.shape == q_latent.shape and out.is_contiguous()
    assert lse.dtype == torch.float32 and lse.shape == q_latent.shape[:3]
    return out.cpu(), lse.cpu()


def on(device, tensor):
    if tensor is None or device == "cpu":
        return tensor
    moved = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    return tensor.to(device) if 0 in tensor.stride() else moved.copy_(tensor)


def agree(result, expected):
    (out, lse), (wanted, wanted_lse) = result, expected
    error = (out.double() - wanted.double()).norm() / wanted.double().norm().clamp_min(1e-30)
    assert error < TOLERANCE[out.dtype]
    torch.testing.assert_close(lse, wanted_lse, rtol=1e-5, atol=1e-5 if out.dtype == torch.float32 else 1e-3)


def operands_of(seed, batch, tokens, heads, width, turn, total, picks, dtype=torch.float32):
    """A cache in which only the listed rows are numbers; a fifth of the list is -1."""
    generator = torch.Generator().manual_seed(seed)
    q_latent = torch.randn(batch, tokens, heads, width, generator=generator).to(dtype)
    q_rope = torch.randn(batch, tokens, heads, turn, generator=generator).to(dtype)
    indices = torch.randint(0, total, (batch, tokens, picks), generator=generator, dtype=torch.int32)
    indices[torch.rand(indices.shape, generator=generator) < 0.2] = -1
    latent, rope = torch.full((batch, total, width), math.nan), torch.full((batch, total, turn), math.nan)
    for sequence in range(batch):
        used = indices[sequence].flatten().unique()
        used = used[used >= 0].long()
        latent[sequence, used] = torch.randn(len(used), width, generator=generator)
        rope[sequence, used] = torch.randn(len(used), turn, generator=generator)
    return q_latent, q_rope, latent.to(dtype), rope.to(dtype), indices


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("batch", "tokens", "heads", "width", "turn", "total", "picks"),
    [(1, 1, 1, 1, 1, 1, 1), (2, 3, 5, 24, 10, 77, 33), (1, 1, 64, 512, 64, 100, 96), (2, 1, 70, 40, 16, 50, 64)],
)
def test_sizes(kernel, device, dtype, batch, tokens, heads, width, turn, total, picks):
    operands = operands_of(picks, batch, tokens, heads, width, turn, total, picks, dtype)
    agree(run(kernel, device, *operands), reference(*operands, scale=0.2))


@pytest.mark.parametrize("empty", ["none", "no channels"])
def test_without_a_rope_part(kernel, device, empty):
    q_latent, q_rope, latent, rope, indices = operands_of(1, 2, 1, 4, 32, 8, 40, 20)
    pair = (None, None) if empty == "none" else (q_rope[..., :0], rope[..., :0])
    agree(
        run(kernel, device, q_latent, pair[0], latent, pair[1], indices),
        reference(q_latent, None, latent, None, indices, scale=0.2),
    )


@pytest.mark.parametrize("splits", [1, 2, 3, 8, 16])
@pytest.mark.parametrize("picks", [1, 17, 128])
def test_split_counts(kernel, device, splits, picks):
    """More splits than blocks too; a row whose list is empty, and one whose picks all lie in the last part."""
    q_latent, q_rope, latent, rope, indices = operands_of(2, 3, 1, 3, 16, 8, 60, picks)
    indices[1] = -1
    indices[2, :, :-1] = -1
    latent[2], rope[2] = 0.5, 0.25
    indices[2, :, -1] = 7
    result = run(kernel, device, q_latent, q_rope, latent, rope, indices, splits=splits)
    agree(result, reference(q_latent, q_rope, latent, rope, indices, scale=0.2))
    assert result[0][1].eq(0).all() and result[1][1].eq(-math.inf).all()


def test_merged_parts_are_stable(kernel, device):
    operands = [on(device, tensor) for tensor in operands_of(3, 2, 2, 4, 32, 8, 90, 80)]
    module = kernel(
        "sparse_attention", dict(zip(OPERANDS, [*operands, None], strict=True)), {"scale": 0.2, "descriptor": ""}
    )
    first = module.launch(*operands)
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(first, module.launch(*operands), strict=True))


@pytest.mark.parametrize("page", [1, 4, 32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pages_in_any_order(kernel, device, page, dtype):
    q_latent, q_rope, latent, rope, indices = operands_of(4, 2, 1, 4, 32, 8, 96, 40, dtype)
    used = 96 // page
    table = (
        torch.randperm(2 * used + 3, generator=torch.Generator().manual_seed(page)).int()[: 2 * used].reshape(2, used)
    )
    pools = [torch.full((2 * used + 3, page, part.shape[-1]), math.nan, dtype=dtype) for part in (latent, rope)]
    for pool, part in zip(pools, (latent, rope), strict=True):
        pool[table.long()] = part.reshape(2, used, page, -1)
    result = run(kernel, device, q_latent, q_rope, *pools, indices, table.clone())
    agree(result, reference(q_latent, q_rope, latent, rope, indices, scale=0.2))


def test_picks_in_an_unmapped_page_count_for_nothing(kernel, device):
    q_latent, q_rope, *_ = operands_of(5, 1, 1, 2, 16, 8, 12, 6)
    latent, rope = torch.randn(3, 4, 16), torch.randn(3, 4, 8)
    table = torch.tensor([[0, -1, 2]], dtype=torch.int32)
    mapped = torch.tensor([[[0, 3, 8, 11, -1, -1]]], dtype=torch.int32)
    into_hole = torch.tensor([[[0, 3, 8, 11, 4, 7]]], dtype=torch.int32)
    expected = reference(q_latent, q_rope, latent.reshape(1, 12, 16), rope.reshape(1, 12, 8), mapped, scale=0.2)
    agree(run(kernel, device, q_latent, q_rope, latent, rope, mapped, table), expected)
    agree(run(kernel, device, q_latent, q_rope, latent, rope, into_hole, table), expected)


def test_indices_out_of_range_count_for_nothing(kernel, device):
    q_latent, q_rope, latent, rope, _ = operands_of(6, 1, 1, 2, 16, 8, 12, 64)
    latent, rope = latent.nan_to_num(0.5), rope.nan_to_num(0.5)
    inside = torch.tensor([[[0, 11, -1, -1]]], dtype=torch.int32)
    outside = torch.tensor([[[0, 11, 12, -7]]], dtype=torch.int32)
    agree(
        run(kernel, device, q_latent, q_rope, latent, rope, outside),
        reference(q_latent, q_rope, latent, rope, inside, scale=0.2),
    )


def test_layouts_that_are_not_contiguous(kernel, device):
    q_latent, q_rope, latent, rope, indices = operands_of(7, 2, 2, 4, 32, 16, 50, 20, torch.bfloat16)
    both = torch.cat([q_latent, q_rope], dim=-1)
    cache = torch.cat([latent, rope], dim=-1)
    flipped = indices.permute(2, 1, 0).contiguous().permute(2, 1, 0)
    views = both[..., :32], both[..., 32:], cache[..., :32], cache[..., 32:], flipped
    agree(run(kernel, device, *views), reference(q_latent, q_rope, latent, rope, indices, scale=0.2))


def test_large_logits_do_not_overflow(kernel, device):
    q_latent, q_rope, latent, rope, indices = operands_of(8, 1, 1, 2, 16, 8, 30, 20)
    operands = q_latent * 100, q_rope * 100, latent * 10, rope, indices
    out, lse = run(kernel, device, *operands)
    picks = indices[0, 0][indices[0, 0] >= 0].long()
    rows, turned = (part[0, picks].double() for part in operands[2:4])
    logits = 0.2 * (operands[0][0, 0].double() @ rows.T + operands[1][0, 0].double() @ turned.T)
    assert logits.abs().max() > 1000
    torch.testing.assert_close(out[0, 0], (logits.softmax(-1) @ rows).float(), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(lse[0, 0], logits.logsumexp(-1).float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_of_ones_sum_to_one(kernel, device, dtype):
    """One peak above many small weights: they add up before they are rounded."""
    latent = torch.ones(1, 512, 16, dtype=dtype)
    rope = torch.zeros(1, 512, 16, dtype=dtype)
    rope[0, 100, 0] = 9.0
    q_rope = torch.zeros(1, 1, 1, 16, dtype=dtype)
    q_rope[..., 0] = 1.0
    indices = torch.arange(512, dtype=torch.int32).reshape(1, 1, 512)
    out, _ = run(kernel, device, torch.zeros(1, 1, 1, 16, dtype=dtype), q_rope, latent, rope, indices, scale=1.0)
    torch.testing.assert_close(
        out.float(), torch.ones(1, 1, 1, 16), rtol=0, atol=1e-5 if dtype == torch.float32 else 4e-3
    )


def test_bf16_results_round_to_nearest_even(kernel, device):
    """A single pick gives its row back to the bit; two equal weights give means that lie between two bf16 values."""
    row = torch.randn(1, 2, 64, generator=torch.Generator().manual_seed(9)).bfloat16()
    zeros = torch.zeros(1, 1, 1, 64, dtype=torch.bfloat16)
    for picks in ([0], [0, 1]):
        indices = torch.tensor(picks, dtype=torch.int32).reshape(1, 1, -1)
        out, _ = run(kernel, device, zeros, None, row, None, indices)
        assert torch.equal(out.flatten(), row[0, picks].float().mean(0).bfloat16())


@triton.jit
def offsets_of(
    table, indices, out, PAGE: tl.constexpr, PAGE_STRIDE: tl.constexpr, COUNT: tl.constexpr, T: tl.constexpr
):
    index = tl.load(indices + tl.arange(0, COUNT))
    page, slot, exists = row_offsets(table, tl.program_id(0).to(tl.int64), index, T, (COUNT, 1), PAGE)
    tl.store(out + tl.arange(0, COUNT), tl.where(exists, page * PAGE_STRIDE + slot * 576, -1))


def test_row_offsets_are_64_bit(device):
    table = torch.tensor([2065, 2066, 4564, 7800], dtype=torch.int32, device=device)
    indices = torch.tensor([0, 64, 128, 192], dtype=torch.int32, device=device)
    out = torch.empty(4, dtype=torch.int64, device=device)
    offsets_of[(1,)](table, indices, out, 64, 1039680, 4, 256)
    assert out.tolist() == [2146939200, 2147978880, 4745099520, 8109504000]
    rows = torch.tensor([4_000_000, 5, -1, 5_000_000], dtype=torch.int32, device=device)
    offsets_of[(1,)](None, rows, out, 0, 0, 4, 4_500_000)
    assert out.tolist() == [2_304_000_000, 2880, -1, -1]


def test_empty_batch(kernel, device):
    q_latent, q_rope, latent, rope, indices = operands_of(10, 1, 1, 2, 16, 8, 12, 6)
    out, lse = run(kernel, device, q_latent[:0], q_rope[:0], latent[:0], rope[:0], indices[:0])
    assert out.shape == (0, 1, 2, 16) and lse.shape == (0, 1, 2)
