"""The indexer's kernel of one launch: programs that share a row, quantised pages, ties, refinement of crowded bins."""

import pytest
import torch
import triton
import triton.language as tl
from indexer_cases import OPERANDS, PAGES, expected, plain, quantised

from kimigraph.codegen.templates.index_selection import bin_range, code_bin


def run(kernel, device, operands, k, splits):
    operands = tuple(None if tensor is None else tensor.to(device) for tensor in operands)
    attributes = {"k": k, "scale": 0.5, "descriptor": PAGES if operands[1].dtype == torch.uint8 else ""}
    options = {} if splits is None else {"splits": splits}
    module = kernel("lightning_indexer", dict(zip(OPERANDS, operands, strict=True)), attributes, **options)
    assert hasattr(module, "index_and_select") == (splits is not None)
    first = module.launch(*operands)
    assert device == "cpu" or torch.equal(first, module.launch(*operands))
    return first.cpu()


@pytest.mark.parametrize("make", [quantised, plain])
@pytest.mark.parametrize(
    ("batch", "tokens", "lengths", "k", "splits"),
    [
        (1, 1, None, 40, 1),
        (1, 1, None, 40, 4),
        (2, 2, [5, 400], 40, 2),
        (1, 2, [500], 100, 8),
        (2, 1, [0, 1], 64, 4),
        (1, 1, [512], 512, 2),
        (1, 1, [300], 600, 2),
    ],
)
def test_shared_rows(kernel, device, make, batch, tokens, lengths, k, splits):
    operands = list(make(torch.Generator().manual_seed(k + splits), batch, tokens, 512))
    operands[3] = None if lengths is None else torch.tensor(lengths, dtype=torch.int32)
    assert torch.equal(run(kernel, device, operands, k, splits), expected(operands, k))


@pytest.mark.parametrize("splits", [None, 2])
def test_unmapped_pages_are_never_listed(kernel, device, splits):
    operands = quantised(torch.Generator().manual_seed(4), 1, 1, 640)
    operands[5][0, 1] = operands[5][0, 7] = -1
    for k in (60, 600):
        picked = run(kernel, device, operands, k, splits)
        assert torch.equal(picked, expected(operands, k))
        assert not ((picked >= 64) & (picked < 128)).any()


@pytest.mark.parametrize("make", [quantised, plain])
def test_plain_form_reads_the_same_caches(kernel, device, make):
    operands = list(make(torch.Generator().manual_seed(9), 2, 2, 256))
    operands[3] = torch.tensor([100, 255], dtype=torch.int32)
    assert torch.equal(run(kernel, device, operands, 70, None), expected(operands, 70))


@pytest.mark.parametrize("values", [(3.0,), (1.0, 0.0, 0.0), (1.0, 1.0078125), (-1.0, -2.0), (0.0,)])
@pytest.mark.parametrize("k", [64, 400])
def test_crowded_bins(kernel, device, values, k):
    """Rows of one value or two, whose keys share a bin: the histogram is refined and ties are cut by index."""
    q = torch.zeros(1, 1, 16, 128, dtype=torch.bfloat16)
    q[0, 0, 0, 0], q[0, 0, 1, 0] = 1.0, -1.0
    weights = torch.zeros(1, 1, 16)
    weights[0, 0, :2] = torch.tensor([1.0, -1.0])
    keys = torch.zeros(1, 512, 128, dtype=torch.bfloat16)
    keys[0, :, 0] = torch.tensor(values).repeat(512)[:512]
    operands = (q, keys, weights, None, None, None)
    assert torch.equal(run(kernel, device, operands, k, 2), expected(operands, k))


def test_part_of_a_slice_bounds_the_rest(kernel, device):
    """Long slices are counted in segments, the later ones only from a bound on."""
    operands = quantised(torch.Generator().manual_seed(12), 1, 1, 2048)
    assert torch.equal(run(kernel, device, operands, 100, 2), expected(operands, 100))


@triton.jit
def bins_of(codes, out, first, COUNT: tl.constexpr):
    place = tl.arange(0, COUNT)
    bin = code_bin(tl.load(codes + place).to(tl.uint32, bitcast=True), first)
    begin, end = bin_range(bin, first)
    tl.store(out + place * 3, bin.to(tl.int64))
    tl.store(out + place * 3 + 1, begin)
    tl.store(out + place * 3 + 2, end)


@pytest.mark.parametrize("first", [1 << 7, 115 << 7, 240 << 7])
def test_bins_cover_the_codes_in_order(device, first):
    edges = torch.tensor([1, 2**31 - 1, 2**31, 2**32 - 1])
    codes = torch.cat([edges, torch.randint(1, 2**32, (508,), generator=torch.Generator().manual_seed(first))])
    codes = codes.sort().values.to(device)
    out = torch.empty(512, 3, dtype=torch.int64, device=device)
    bins_of[(1,)](codes.to(torch.uint32).view(torch.int32), out, first, 512)
    bins, begin, end = out.unbind(1)
    assert (bins[1:] >= bins[:-1]).all() and bins.min() >= 0 and bins.max() <= 4095
    assert ((begin <= codes) & (codes < end)).all()
