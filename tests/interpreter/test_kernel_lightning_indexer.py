"""The Lightning Indexer's kernel against the reference and against a plain sort in Python."""

import math

import pytest
import torch
import triton
import triton.language as tl

from kimigraph.codegen.templates.lightning_indexer import key_offsets, order_code
from kimigraph.ir.reference.lightning_indexer import lightning_indexer as reference

OPERANDS = ("q", "keys", "weights", "lengths", "mask", "block_table")


def run(kernel, device, q, keys, weights, lengths=None, mask=None, block_table=None, *, k, scale=0.5, **options):
    """One launch; strides survive the way to the device."""
    operands = [on(device, tensor) for tensor in (q, keys, weights, lengths, mask, block_table)]
    attributes = {"k": k, "scale": scale, "descriptor": ""}
    module = kernel("lightning_indexer", dict(zip(OPERANDS, operands, strict=True)), attributes, **options)
    picked = module.launch(*operands)
    assert picked.dtype == torch.int32 and tuple(picked.shape) == (*q.shape[:2], k)
    return picked.cpu()


def on(device, tensor):
    if tensor is None or device == "cpu":
        return tensor
    moved = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    return tensor.to(device) if 0 in tensor.stride() else moved.copy_(tensor)


def whole(generator, *shape, dtype=torch.float32, span=3):
    """Small integers: every sum is exact, and ties are many."""
    return torch.randint(-span, span + 1, shape, generator=generator).to(dtype)


def integers(seed, batch, tokens, heads, width, total, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    q = whole(generator, batch, tokens, heads, width, dtype=dtype)
    keys = whole(generator, batch, total, width, dtype=dtype)
    return q, keys, whole(generator, batch, tokens, heads, span=2)


def identity(values):
    """Operands whose scores are ``values`` [B, S = 1, T]: relu(x) - relu(-x)."""
    values = torch.as_tensor(values, dtype=torch.float32).reshape(-1, len(values[0]))
    q = torch.tensor([1.0, -1.0]).reshape(1, 1, 2, 1).repeat(len(values), 1, 1, 1)
    return q, values.unsqueeze(-1), torch.tensor([1.0, -1.0]).expand(len(values), 1, 2).contiguous()


def by_sorting(q, keys, weights, visible, k, scale=0.5):
    """The rule word by word: score descending, index ascending, NaN as -inf, -0 as +0; then ascending and -1."""
    dots = torch.einsum("bshd,btd->bsht", q.double(), keys.double()) * scale
    scores = torch.einsum("bsh,bsht->bst", weights.double(), dots.relu())
    rows = torch.full((*scores.shape[:2], k), -1, dtype=torch.int32)
    for b, s in torch.cartesian_prod(*(torch.arange(size) for size in scores.shape[:2])).tolist():
        values = [-math.inf if math.isnan(value) else value + 0.0 for value in scores[b, s].tolist()]
        seen = [t for t in range(len(values)) if visible[b][s][t]]
        best = sorted(sorted(seen, key=lambda t: (-values[t], t))[:k])
        rows[b, s, : len(best)] = torch.tensor(best, dtype=torch.int32)
    return rows


def causal(lengths, tokens, total):
    return [[[t < length + s for t in range(total)] for s in range(tokens)] for length in lengths]


def everything(q, keys):
    return causal([keys.shape[1]] * q.shape[0], q.shape[1], keys.shape[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("batch", "tokens", "heads", "width", "total", "k"),
    [
        (1, 1, 1, 1, 1, 1),
        (2, 3, 5, 24, 77, 9),
        (1, 1, 64, 128, 300, 64),
        (3, 1, 70, 20, 130, 130),
        (2, 2, 4, 300, 257, 100),
    ],
)
def test_sizes(kernel, device, dtype, batch, tokens, heads, width, total, k):
    operands = integers(total, batch, tokens, heads, width, total, dtype)
    picked = run(kernel, device, *operands, k=k)
    assert torch.equal(picked, by_sorting(*operands, everything(*operands[:2]), k))
    assert torch.equal(picked, reference(*operands, k=k, scale=0.5))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
def test_gaussian_scores(kernel, device, seed, weight_dtype):
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(2, 1, 32, 64, generator=generator).bfloat16()
    keys = torch.randn(2, 500, 64, generator=generator).bfloat16()
    weights = torch.randn(2, 1, 32, generator=generator).to(weight_dtype)
    expected = reference(q, keys, weights, k=50, scale=0.125)
    assert torch.equal(run(kernel, device, q, keys, weights, k=50, scale=0.125), expected)


@pytest.mark.parametrize(
    "lengths", [torch.tensor(40), torch.tensor([0, 100, 77], dtype=torch.int32), torch.tensor([5, 3, 76])]
)
def test_lengths_hide_keys_that_hold_nan(kernel, device, lengths):
    q, keys, weights = integers(4, 3, 4, 8, 16, 77)
    limits = lengths.expand(3).tolist()
    for sequence, limit in enumerate(limits):
        keys[sequence, limit + 3 :] = math.nan
    picked = run(kernel, device, q, keys, weights, lengths, k=20)
    assert torch.equal(picked, by_sorting(q, keys, weights, causal(limits, 4, 77), 20))
    assert torch.equal(picked, reference(q, keys, weights, lengths, k=20, scale=0.5))


def test_strided_lengths(kernel, device):
    q, keys, weights = integers(5, 3, 1, 4, 16, 40)
    lengths = torch.tensor([10, 0, 25, 0, 40, 0], dtype=torch.int32)[::2]
    assert torch.equal(
        run(kernel, device, q, keys, weights, lengths, k=8), reference(q, keys, weights, lengths, k=8, scale=0.5)
    )


@pytest.mark.parametrize("form", ["keys only", "row of keys", "one for all tokens", "transposed", "sequence only"])
def test_masks_of_any_stride(kernel, device, form):
    q, keys, weights = integers(6, 2, 3, 4, 16, 50)
    full = torch.rand(2, 3, 50, generator=torch.Generator().manual_seed(6)) < 0.4
    mask = {
        "keys only": full[0, 0],
        "row of keys": full[:1, :1],
        "one for all tokens": full[:, :1].expand(2, 3, 50),
        "transposed": full.permute(2, 0, 1).contiguous().permute(1, 2, 0),
        "sequence only": torch.tensor([True, False]).reshape(2, 1, 1),
    }[form]
    visible = mask.expand(2, 3, 50).tolist()
    picked = run(kernel, device, q, keys, weights, None, mask, k=25)
    assert torch.equal(picked, by_sorting(q, keys, weights, visible, 25))


def test_mask_and_lengths_together(kernel, device):
    q, keys, weights = integers(7, 2, 2, 4, 16, 60)
    mask = torch.rand(2, 2, 60, generator=torch.Generator().manual_seed(7)) < 0.5
    lengths = torch.tensor([20, 60])
    picked = run(kernel, device, q, keys, weights, lengths, mask, k=16)
    assert torch.equal(picked, reference(q, keys, weights, lengths, mask, k=16, scale=0.5))


@pytest.mark.parametrize("page", [1, 4, 48, 64])
def test_pages_in_any_order(kernel, device, page):
    q, keys, weights = integers(8, 2, 2, 4, 16, 192)
    lengths = torch.tensor([70, 190], dtype=torch.int32)
    used = 192 // page
    order = torch.randperm(2 * used + 3, generator=torch.Generator().manual_seed(page)).int()
    table = order[: 2 * used].reshape(2, used).clone()
    pool = torch.full((2 * used + 3, page, 16), math.nan)
    pool[table.long()] = keys.reshape(2, used, page, 16)
    # Past the length pages are not mapped.
    table[0, -(-71 // page) :] = -1
    picked = run(kernel, device, q, pool, weights, lengths, None, table, k=24)
    assert torch.equal(picked, reference(q, keys, weights, lengths, k=24, scale=0.5))


def test_layouts_that_are_not_contiguous(kernel, device):
    q, keys, weights = integers(9, 2, 3, 6, 24, 90, torch.bfloat16)
    views = (
        q.permute(3, 2, 0, 1).contiguous().permute(2, 3, 1, 0),
        torch.cat([keys, keys + 1], dim=-1)[..., :24],
        weights.transpose(1, 2).contiguous().transpose(1, 2),
    )
    assert torch.equal(run(kernel, device, *views, k=12), reference(q, keys, weights, k=12, scale=0.5))


@pytest.mark.parametrize(("total", "k", "winners"), [(300, 64, 5), (2080, 512, 25)])
def test_ties_are_cut_by_index(kernel, device, total, k, winners):
    scores = torch.zeros(1, total)
    scores[0, torch.randperm(total, generator=torch.Generator().manual_seed(0))[:winners]] = 1.0
    picked = run(kernel, device, *identity(scores), k=k, scale=1.0)[0, 0].tolist()
    high = scores[0].nonzero().flatten().tolist()
    low = [t for t in range(total) if scores[0, t] == 0][: k - winners]
    assert picked == sorted(high + low)


@pytest.mark.parametrize("k", [1, 60, 290, 300])
def test_selection_in_many_steps(kernel, device, k):
    """The running counts cross steps, with ties on both sides of each border."""
    scores = torch.randn(2, 300, generator=torch.Generator().manual_seed(k)).mul(2).round()
    operands = identity(scores)
    picked = run(kernel, device, *operands, k=k, scale=1.0, select_block=32)
    assert torch.equal(picked, by_sorting(*operands, everything(*operands[:2]), k, 1.0))


def test_two_launches_agree_to_the_bit(kernel, device):
    operands = [on(device, tensor) for tensor in integers(13, 2, 2, 8, 32, 400, torch.bfloat16)]
    attributes = {"k": 50, "scale": 0.5, "descriptor": ""}
    module = kernel("lightning_indexer", dict(zip(OPERANDS, [*operands, None, None, None], strict=True)), attributes)
    assert torch.equal(module.launch(*operands), module.launch(*operands))


def test_nan_ranks_as_minus_infinity(kernel, device):
    nan, inf = math.nan, math.inf
    rows = [[1, nan, inf, -inf, 2], [nan] * 5, [-inf, nan, -inf, nan, -3], [nan, 0, nan, nan, nan]]
    picked = run(kernel, device, *identity(rows), k=3, scale=1.0)
    assert picked[:, 0].tolist() == [[0, 2, 4], [0, 1, 2], [0, 1, 4], [0, 1, 2]]


def test_visible_nan_comes_before_hidden_keys(kernel, device):
    mask = torch.tensor([True, False, True, False, True]).reshape(1, 1, 5)
    operands = identity([[math.nan, 9.0, -math.inf, 8.0, 1.0]])
    assert run(kernel, device, *operands, None, mask, k=2, scale=1.0).tolist() == [[[0, 4]]]
    assert run(kernel, device, *operands, None, mask, k=5, scale=1.0).tolist() == [[[0, 2, 4, -1, -1]]]


def test_infinite_key_with_padded_heads(kernel, device):
    q, weights = torch.ones(1, 1, 3, 1), torch.ones(1, 1, 3)
    keys = torch.tensor([1.0, 5.0, math.inf, 2.0]).reshape(1, 4, 1)
    assert run(kernel, device, q, keys, weights, k=1).tolist() == [[[2]]]


def test_products_beyond_half_precision(kernel, device):
    q = torch.full((1, 1, 2, 128), 30.0, dtype=torch.float16)
    keys = torch.stack([torch.full((128,), 30.0), torch.full((128,), 31.0)]).half().unsqueeze(0)
    assert run(kernel, device, q, keys, torch.ones(1, 1, 2), k=1, scale=1.0).tolist() == [[[1]]]


def test_relu_before_the_sum_over_heads(kernel, device):
    q = torch.eye(2).reshape(1, 1, 2, 2)
    keys = torch.tensor([[[-5.0, 3.0], [1.0, 0.0]]])
    assert run(kernel, device, q, keys, torch.ones(1, 1, 2), k=1, scale=1.0).tolist() == [[[0]]]


@pytest.mark.parametrize("poison", [0, -1, 0x7F800000, 0x7FC00000, -(2**31)])
def test_what_scratch_held_does_not_matter(kernel, device, poison):
    q, keys, weights = integers(10, 3, 3, 4, 16, 300)
    lengths = torch.tensor([7, 130, 300])
    picked = run(kernel, device, q, keys, weights, lengths, k=40, poison=poison)
    assert torch.equal(picked, reference(q, keys, weights, lengths, k=40, scale=0.5))


def test_a_row_does_not_depend_on_its_neighbours(kernel, device):
    q, keys, weights = integers(11, 4, 1, 4, 16, 500)
    lengths = torch.tensor([3, 500, 3, 499])
    together = run(kernel, device, q, keys, weights, lengths, k=60)
    for row in range(4):
        one = slice(row, row + 1)
        assert torch.equal(together[one], run(kernel, device, q[one], keys[one], weights[one], lengths[one], k=60))


def test_empty_rows_and_empty_batch(kernel, device):
    q, keys, weights = integers(12, 3, 1, 4, 16, 50)
    assert run(kernel, device, q, keys, weights, torch.zeros(3, dtype=torch.int32), k=7).eq(-1).all()
    assert run(kernel, device, q[:0], keys[:0], weights[:0], k=7).shape == (0, 1, 7)


@triton.jit
def offsets_of(table, out, PAGE: tl.constexpr, PAGE_STRIDE: tl.constexpr, COUNT: tl.constexpr):
    position = tl.arange(0, COUNT) * PAGE
    offset, exists = key_offsets(
        table, tl.program_id(0).to(tl.int64), position, position >= 0, (PAGE_STRIDE, 1, 1), (COUNT, 1), PAGE
    )
    tl.store(out + tl.arange(0, COUNT), tl.where(exists, offset, -1))


def test_page_offsets_are_64_bit(device):
    table = torch.tensor([2065, 2066, 4564, 7800], dtype=torch.int32, device=device)
    out = torch.empty(4, dtype=torch.int64, device=device)
    offsets_of[(1,)](table, out, 64, 1039680, 4)
    assert out.tolist() == [2146939200, 2147978880, 4745099520, 8109504000]


@triton.jit
def codes_of(scores, out, COUNT: tl.constexpr):
    place = tl.arange(0, COUNT)
    tl.store(out + place, order_code(tl.load(scores + place)).to(tl.int64))


def test_codes_order_as_scores(device):
    scores = torch.tensor([math.nan, -math.inf, -1.5, -1e-40, -0.0, 0.0, 1e-40, math.inf], device=device)
    out = torch.empty(8, dtype=torch.int64, device=device)
    codes_of[(1,)](scores, out, 8)
    codes = out.tolist()
    assert codes[0] == codes[1] and codes[4] == codes[5] and min(codes) > 0
    assert codes[1] < codes[2] < codes[3] < codes[4] < codes[6] < codes[7]


@pytest.mark.parametrize("masked", [False, True])
def test_many_rows_share_little_memory(kernel, device, masked):
    """Seven rows of two sequences with memory for the scores of three of each: the last three overlap the others."""
    generator = torch.Generator().manual_seed(3)

    def whole(*shape):
        return torch.randint(-3, 4, shape, generator=generator).float().to(device)

    q, keys, weights = whole(2, 7, 4, 16), whole(2, 40, 16), whole(2, 7, 4)
    lengths = None if masked else torch.tensor([30, 2], device=device)
    mask = (whole(2, 7, 40) > 0) if masked else None
    operands = (q, keys, weights, lengths, mask, None)
    names = ("q", "keys", "weights", "lengths", "mask", "block_table")
    attributes = {"k": 9, "scale": 1.0, "descriptor": ""}
    module = kernel("lightning_indexer", dict(zip(names, operands, strict=True)), attributes, most_codes=2 * 3 * 40 + 5)
    assert module.CONSTANTS["codes"] == (6, 40)
    wanted = torch.ops.kimigraph.lightning_indexer(q, keys, weights, lengths, mask, k=9, scale=1.0)
    assert torch.equal(module.launch(*operands), wanted)
