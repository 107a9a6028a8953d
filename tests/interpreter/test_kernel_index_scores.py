"""The scores of picked index keys: the kernel against the reference, over every form of cache, with holes and NaN."""

import math

import pytest
import torch

from kimigraph.ir.descriptors import IndexKeyDescriptor
from kimigraph.ir.errors import CompileError
from kimigraph.ir.reference.index_key_write import index_key_write
from kimigraph.ir.reference.index_scores import index_scores
from kimigraph.ir.reference.mxfp8_quantize import mxfp8_quantize

OPERANDS = ("q", "keys", "weights", "picks", "block_table", "q_scales")
FP8 = "float8_e4m3fn"
PAGES = IndexKeyDescriptor("paged", FP8, 128, page_size=64, scales="power2")


class Data:
    """Operands of one call. ``whole`` numbers make every sum exact."""

    def __init__(self, seed: int = 0):
        self.generator = torch.Generator().manual_seed(seed)

    def whole(self, *shape, span=3):
        return torch.randint(-span, span + 1, shape, generator=self.generator).float()

    def normal(self, *shape):
        return torch.randn(shape, generator=self.generator)

    def picks(self, batch, tokens, k, total, holes=0.2):
        """Different positions in any order, -1 at some places, in the middle, too."""
        rows = [torch.randperm(total, generator=self.generator)[:k] for _ in range(batch * tokens)]
        rows = torch.nn.functional.pad(torch.stack(rows), (0, max(k - total, 0)), value=-1)
        hole = torch.rand(rows.shape, generator=self.generator) < holes
        return rows.masked_fill(hole, -1).to(torch.int32).view(batch, tokens, k)

    def table(self, batch, pages, spare=2):
        order = torch.randperm(batch * pages + spare, generator=self.generator)[: batch * pages]
        return order.to(torch.int32).view(batch, pages)


def run(kernel, device, q, keys, weights, picks, table=None, q_scales=None, *, descriptor="", scale=0.5, **more):
    """The launch's result, on the CPU, and the reference's; every place written, and twice the same."""
    operands = (q, keys, weights, picks, table, q_scales)
    placed = dict(zip(OPERANDS, [None if x is None else moved(x, device) for x in operands], strict=True))
    attributes = {"scale": scale, "quantises_q": False, "descriptor": str(descriptor), **more}
    module = kernel("index_scores", placed, attributes, target="cuda" if device == "cuda" else "cpu")
    got = module.launch(*placed.values())
    assert got.dtype == torch.float32 and got.shape == picks.shape
    assert device == "cpu" or torch.equal(got, module.launch(*placed.values()))
    wanted = index_scores(q, keys, weights, picks, block_table=table, q_scales=q_scales, **attributes)
    return got.cpu(), wanted


def moved(tensor, device):
    """Strides survive the way to the device."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device).copy_(tensor)


def exact(pair):
    got, wanted = pair
    assert torch.equal(got, wanted)
    assert torch.equal(got.view(torch.int32), wanted.view(torch.int32)), "a zero is +0"
    assert wanted.isfinite().any()


def close(pair, picks):
    got, wanted = pair
    assert torch.equal(got == -math.inf, picks < 0)
    torch.testing.assert_close(got, wanted, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("batch", "tokens", "heads", "width", "total", "k"),
    [
        (1, 1, 1, 1, 1, 1),
        (2, 3, 5, 24, 77, 9),
        (1, 1, 64, 128, 300, 129),
        (1, 2, 70, 20, 130, 200),
        (2, 1, 3, 300, 90, 64),
    ],
)
def test_sizes(kernel, device, dtype, batch, tokens, heads, width, total, k):
    data = Data(total)
    q, keys = data.whole(batch, tokens, heads, width).to(dtype), data.whole(batch, total, width).to(dtype)
    weights = data.whole(batch, tokens, heads, span=2)
    exact(run(kernel, device, q, keys, weights, data.picks(batch, tokens, k, total, holes=0.2 if k > 1 else 0.0)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
def test_gaussian_scores(kernel, device, dtype, weight_dtype):
    data = Data(1)
    q, keys = data.normal(2, 2, 40, 128).to(dtype), data.normal(2, 300, 128).to(dtype)
    picks = data.picks(2, 2, 70, 300)
    close(run(kernel, device, q, keys, data.normal(2, 2, 40).to(weight_dtype), picks, scale=0.088), picks)


def test_queries_of_another_type_than_keys(kernel, device):
    data = Data(2)
    q, keys, picks = data.normal(1, 1, 8, 64), data.normal(1, 50, 64).bfloat16(), data.picks(1, 1, 20, 50)
    close(run(kernel, device, q, keys, data.normal(1, 1, 8), picks), picks)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("page", [1, 48, 64])
def test_pages_in_any_order_around_poison(kernel, device, dtype, page):
    """NaN stands in the pages and rows that nobody picked."""
    data, pages = Data(page), 192 // page
    table = data.table(2, pages)
    picks = data.picks(2, 2, 37, 192)
    keys = torch.full((2 * pages + 2, page, 32), math.nan)
    for row, chosen in enumerate(picks.flatten(1)):
        at = chosen[chosen >= 0].long()
        keys[table[row, at // page].long(), at % page] = data.whole(len(at), 32)
    q = data.whole(2, 2, 4, 32).to(dtype)
    exact(run(kernel, device, q, keys.to(dtype), data.whole(2, 2, 4), picks, table))


def packed(data, batch, pages, picks, whole=True):
    """Pages of bytes, values then scales; NaN, values and scales, wherever nobody picked."""
    table, count = data.table(batch, pages), batch * pages + 2
    values = torch.full((count, 64, 128), 0x7F, dtype=torch.uint8)
    scales = torch.full((count, 64), math.nan)
    for row, chosen in enumerate(picks.flatten(1)):
        at = chosen[chosen >= 0].long()
        place = table[row, at // 64].long(), at % 64
        given = data.whole(len(at), 128) if whole else data.normal(len(at), 128)
        values[place] = given.to(torch.float8_e4m3fn).view(torch.uint8)
        scales[place] = torch.tensor([0.5, 1.0, 2.0])[torch.randint(0, 3, (len(at),), generator=data.generator)]
    keys = torch.cat([values.flatten(1), scales.view(torch.uint8)], 1).view(count, 64, 132)
    return keys, table


@pytest.mark.parametrize("q_dtype", [torch.float8_e4m3fn, torch.bfloat16])
@pytest.mark.parametrize(("batch", "tokens", "heads", "k"), [(2, 1, 64, 100), (1, 3, 10, 65)])
def test_packed_pages(kernel, device, q_dtype, batch, tokens, heads, k):
    data = Data(heads)
    picks = data.picks(batch, tokens, k, 256)
    keys, table = packed(data, batch, 4, picks)
    q, weights = data.whole(batch, tokens, heads, 128).to(q_dtype), data.whole(batch, tokens, heads, span=2)
    exact(run(kernel, device, q, keys, weights, picks, table, descriptor=PAGES))


def test_packed_gaussian_scores(kernel, device):
    data = Data(3)
    picks = data.picks(2, 1, 130, 256)
    keys, table = packed(data, 2, 4, picks, whole=False)
    q, weights = data.normal(2, 1, 64, 128).to(torch.float8_e4m3fn), data.normal(2, 1, 64)
    close(run(kernel, device, q, keys, weights, picks, table, descriptor=PAGES, scale=0.088), picks)


@pytest.mark.parametrize("q_dtype", [torch.float8_e4m3fn, torch.bfloat16])
def test_every_byte_of_a_key_is_its_number(kernel, device, q_dtype):
    """relu(x) - relu(-x) is x."""
    codes = torch.arange(256).to(torch.uint8)
    values = torch.zeros(4, 64, 128, dtype=torch.uint8)
    values[..., 77] = codes.view(4, 64)
    scales = torch.ones(4, 64).view(torch.uint8)
    keys = torch.cat([values.flatten(1), scales.view(4, -1)], 1).view(4, 64, 132)
    q = torch.zeros(1, 1, 2, 128)
    q[0, 0, :, 77] = torch.tensor([1.0, -1.0])
    weights, picks = q[..., 77], torch.arange(256, dtype=torch.int32).view(1, 1, -1)
    table = torch.arange(4, dtype=torch.int32).view(1, -1)
    got, _ = run(kernel, device, q.to(q_dtype), keys, weights, picks, table, descriptor=PAGES, scale=1.0)
    assert torch.equal(got.flatten(), codes.view(torch.float8_e4m3fn).float().nan_to_num(-math.inf) + 0.0)


@pytest.mark.parametrize("quantise", ["before", "inside", "never"])
@pytest.mark.parametrize(("page", "width"), [(0, 128), (16, 128), (16, 48)])
def test_keys_in_groups(kernel, device, quantise, page, width):
    data, total = Data(width), 64
    form = IndexKeyDescriptor("paged" if page else "contiguous", FP8, width, page, "e8m0", 32)
    table = data.table(2, total // page) if page else None
    keys = torch.zeros(2 * total // page + 2 if page else 2, page or total, form.row, dtype=torch.uint8)
    values = data.normal(2, total, width) * torch.exp2(data.whole(2, total, 1))
    index_key_write(
        keys, values.bfloat16(), torch.arange(total).expand(2, total), block_table=table, descriptor=str(form)
    )
    q, weights, picks = data.normal(2, 2, 20, width).bfloat16(), data.normal(2, 2, 20), data.picks(2, 2, 40, total)
    codes, scales = mxfp8_quantize(q, group=32) if quantise == "before" else (q, None)
    more = {"descriptor": form, "quantises_q": quantise == "inside"}
    got, wanted = run(kernel, device, codes, keys, weights, picks, table, scales, **more)
    assert torch.equal(got == -math.inf, picks < 0)
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4 * float(wanted[picks >= 0].abs().max()))


def test_nan_counts_as_lowest_and_zero_has_no_sign(kernel, device):
    """NaN under the ReLU reaches the sum; so do infinities, but not through heads of the padding."""
    q = torch.tensor([1.0, -1.0, 1.0]).reshape(1, 1, 3, 1)
    keys = torch.tensor([math.nan, 2.0, 0.0, -1.0, math.inf, -math.inf]).reshape(1, 6, 1)
    weights = torch.tensor([-1.0, 0.5, 0.0]).reshape(1, 1, 3)
    picks = torch.tensor([[[0, 1, 2, 3, 4, 5, -1, 3]]], dtype=torch.int32)
    got, wanted = run(kernel, device, q, keys, weights, picks)
    assert torch.equal(got, wanted) and not got.signbit()[0, 0, 2]
    assert got[0, 0].tolist() == [-math.inf, -1.0, 0.0, 0.25, -math.inf, math.inf, -math.inf, 0.25]


@pytest.mark.parametrize("scale", [-0.5, 0.0])
def test_the_scale_stands_under_the_relu(kernel, device, scale):
    data = Data(5)
    q, keys, picks = data.whole(1, 1, 4, 16), data.whole(1, 40, 16), data.picks(1, 1, 20, 40)
    exact(run(kernel, device, q, keys, data.whole(1, 1, 4), picks, scale=scale))


def test_strides_and_positions_of_64_bits(kernel, device):
    data = Data(6)
    q = data.whole(2, 4, 3, 16).transpose(1, 2)
    keys, weights = data.whole(40, 2, 16).transpose(0, 1), data.whole(2, 4, 3).transpose(1, 2)
    picks = data.picks(2, 3, 40, 40).long()[:, :, ::2]
    exact(run(kernel, device, q, keys, weights, picks))


def test_rows_without_picks(kernel, device):
    data = Data(7)
    picks = torch.full((1, 2, 20), -1, dtype=torch.int32)
    got, wanted = run(kernel, device, data.whole(1, 2, 4, 16), data.whole(1, 0, 16), data.whole(1, 2, 4), picks)
    assert torch.equal(got, wanted) and (got == -math.inf).all()


def test_equal_keys_score_equal_wherever_they_stand(kernel, device):
    """Ranks compare scores: a tie must be one in every tile and at every place of it."""
    data = Data(8)
    q, weights = data.normal(1, 1, 64, 128).bfloat16(), data.normal(1, 1, 64)
    keys = data.normal(1, 1, 128).bfloat16().expand(1, 150, 128).contiguous()
    got, _ = run(kernel, device, q, keys, weights, data.picks(1, 1, 150, 150, holes=0.0), scale=0.088)
    assert got.unique().numel() == 1


def test_what_the_kernel_cannot_read_is_refused(kernel, device):
    data = Data(9)
    q, weights, picks = data.whole(1, 1, 4, 16), data.whole(1, 1, 4), data.picks(1, 1, 8, 8)
    with pytest.raises(CompileError, match="keep them as bytes under a quantised descriptor"):
        run(kernel, device, q, data.whole(1, 8, 16).to(torch.float8_e4m3fn), weights, picks)
    keys, table = packed(data, 1, 1, picks)
    with pytest.raises(CompileError, match="pass the cache itself, not a view of it"):
        run(kernel, device, data.whole(1, 1, 4, 128), keys[::2], weights, picks, table, descriptor=PAGES)
