"""The indexer's plain form over the caches of the fast ones, rows of ties; and where scores stand in a histogram."""

import pytest
import torch
import triton
import triton.language as tl
from indexer_cases import OPERANDS, PAGES, expected, plain, quantised

from kimigraph.codegen.templates.fp8_bytes import e4m3_value
from kimigraph.codegen.templates.score_window import part_of_range, range_shift, window, window_place, window_range


def run(kernel, device, operands, k):
    operands = tuple(None if tensor is None else tensor.to(device) for tensor in operands)
    attributes = {"k": k, "scale": 0.5, "descriptor": PAGES if operands[1].dtype == torch.uint8 else ""}
    module = kernel("lightning_indexer", dict(zip(OPERANDS, operands, strict=True)), attributes)
    first = module.launch(*operands)
    assert device == "cpu" or torch.equal(first, module.launch(*operands))
    return first.cpu()


@pytest.mark.parametrize("make", [quantised, plain])
@pytest.mark.parametrize(
    ("batch", "tokens", "lengths", "k"),
    [
        (1, 1, None, 40),
        (2, 2, [5, 400], 40),
        (1, 2, [500], 100),
        (2, 1, [0, 1], 64),
        (1, 1, [512], 512),
        (1, 1, [300], 600),
    ],
)
def test_rows_of_any_length(kernel, device, make, batch, tokens, lengths, k):
    operands = list(make(torch.Generator().manual_seed(k), batch, tokens, 512))
    operands[3] = None if lengths is None else torch.tensor(lengths, dtype=torch.int32)
    assert torch.equal(run(kernel, device, operands, k), expected(operands, k))


def test_unmapped_pages_are_never_listed(kernel, device):
    operands = quantised(torch.Generator().manual_seed(4), 1, 1, 640)
    operands[5][0, 1] = operands[5][0, 7] = -1
    for k in (60, 600):
        picked = run(kernel, device, operands, k)
        assert torch.equal(picked, expected(operands, k))
        assert not ((picked >= 64) & (picked < 128)).any()


@pytest.mark.parametrize("values", [(3.0,), (1.0, 0.0, 0.0), (1.0, 1.0078125), (-1.0, -2.0), (0.0,)])
@pytest.mark.parametrize("k", [64, 400])
def test_rows_of_few_values(kernel, device, values, k):
    """Ties are cut by index."""
    q = torch.zeros(1, 1, 16, 128, dtype=torch.bfloat16)
    q[0, 0, 0, 0], q[0, 0, 1, 0] = 1.0, -1.0
    weights = torch.zeros(1, 1, 16)
    weights[0, 0, :2] = torch.tensor([1.0, -1.0])
    keys = torch.zeros(1, 512, 128, dtype=torch.bfloat16)
    keys[0, :, 0] = torch.tensor(values).repeat(512)[:512]
    operands = (q, keys, weights, None, None, None)
    assert torch.equal(run(kernel, device, operands, k), expected(operands, k))


@triton.jit
def places_of(codes, out, peak, COUNT: tl.constexpr):
    index = tl.arange(0, COUNT)
    negative, positive = window(peak)
    place = window_place(tl.load(codes + index).to(tl.uint32, bitcast=True), negative, positive)
    begin, last = window_range(place, negative, positive)
    tl.store(out + index * 3, place.to(tl.int64))
    tl.store(out + index * 3 + 1, begin.to(tl.int64))
    tl.store(out + index * 3 + 2, last.to(tl.int64))


@pytest.mark.parametrize("peak", [0.0, 1e-38, 1.0, 3.0e4, 3.0e38, float("inf")])
def test_window_covers_the_codes_in_order(device, peak):
    generator = torch.Generator().manual_seed(1)
    scores = (torch.rand(254, generator=generator) ** 12 * min(peak, 3.4e38)).float()
    bits = torch.cat([scores, torch.tensor([peak, 0.0])]).view(torch.int32).long()
    codes = torch.cat([bits + 2**31, 2**31 - 1 - bits]).sort(descending=True).values
    codes[-1] = 2**31 - 1 - 0x7F800000  # -inf, which NaN counts as, below any peak
    out = torch.empty(512, 3, dtype=torch.int64, device=device)
    peak_bits = int(torch.tensor(peak).view(torch.int32))
    places_of[(1,)](codes.to(torch.uint32).view(torch.int32).to(device), out, peak_bits, 512)
    places, begin, last = out.cpu().unbind(1)
    assert (places[1:] >= places[:-1]).all() and places.min() >= 0 and places.max() <= 4094
    assert ((begin <= codes) & (codes <= last)).all()


@triton.jit(do_not_specialize=["begin", "last"])
def parts_of(codes, out, begin, last, COUNT: tl.constexpr):
    index = tl.arange(0, COUNT)
    begin = begin.to(tl.uint32)
    last = last.to(tl.uint32)
    shift = range_shift(begin, last)
    place = ((last - tl.load(codes + index).to(tl.uint32, bitcast=True)) >> shift).to(tl.int32)
    low, high = part_of_range(place, shift, begin, last)
    tl.store(out + index * 3, place.to(tl.int64))
    tl.store(out + index * 3 + 1, low.to(tl.int64))
    tl.store(out + index * 3 + 2, high.to(tl.int64))


@pytest.mark.parametrize(("begin", "last"), [(1, 2**32 - 1), (1, 5000), (2**31, 2**31 + 65535), (77, 77)])
def test_parts_cover_a_range_in_order(device, begin, last):
    codes = torch.randint(begin, last + 1, (254,), generator=torch.Generator().manual_seed(last))
    codes = torch.cat([codes, torch.tensor([begin, last])]).sort(descending=True).values
    out = torch.empty(256, 3, dtype=torch.int64, device=device)
    parts_of[(1,)](codes.to(torch.uint32).view(torch.int32).to(device), out, begin, last, 256)
    places, low, high = out.cpu().unbind(1)
    assert (places[1:] >= places[:-1]).all() and places.min() >= 0 and places.max() <= 4095
    assert ((low <= codes) & (codes <= high)).all() and low.min() >= begin and high.max() <= last


@triton.jit
def values_of(bits, out):
    place = tl.arange(0, 256)
    tl.store(out + place, e4m3_value(tl.load(bits + place)))


def test_every_e4m3_byte_is_decoded(device):
    bits = torch.arange(256, device=device).to(torch.uint8)
    out = torch.empty(256, device=device)
    values_of[(1,)](bits, out)
    assert torch.equal(out.nan_to_num(777.0), bits.view(torch.float8_e4m3fn).float().nan_to_num(777.0))
