"""``mxfp8_quantize`` bit by bit: groups of any size, every kind of number, exact arithmetic as the judge."""

import math
from fractions import Fraction

import pytest
import torch
from exact_formats import e4m3_value, mxfp8

from kimigraph.ir.operators import OPERATORS, Cost
from kimigraph.ir.reference.mxfp8_quantize import mxfp8_dequantize

QUANTIZE = torch.ops.kimigraph.mxfp8_quantize


def numbers(kind, rows, width):
    """fp32 [rows, width] of one kind."""
    wild = torch.randint(-(2**31), 2**31, (rows, width)).to(torch.int32).view(torch.float32)
    values = torch.randn(rows, width)
    match kind:
        case "random":
            return values
        case "bits":  # every exponent, NaN in some groups
            return wild
        case "subnormal":
            return torch.randint(-(2**23), 2**23, (rows, width)).to(torch.int32).abs().view(torch.float32) * wild.sign()
        case "tiny":  # around 448 * 2^-127, where the exponent stops
            return values * 2.0**-119
        case "huge":
            return values.clamp(-2, 2) * 1.7e38
        case "zero":
            return torch.where(values > 0, 0.0, -0.0)
        case "nan":
            return torch.where(torch.rand(rows, width) < 0.02, math.nan, values)
        case "infinite":
            return torch.where(torch.rand(rows, width) < 0.02, math.copysign(math.inf, values[0, 0]), values * 1e37)
        case "outliers":
            return torch.where(torch.arange(width) % 37 == 5, values * 50, values)
    raise AssertionError(kind)


KINDS = ("random", "bits", "subnormal", "tiny", "huge", "zero", "nan", "infinite", "outliers")


@pytest.mark.parametrize("rounding", ["rceil", "floor"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("width", "group"), [(128, 32), (200, 32), (192, 128), (30, 7), (5, 9), (3, 1)])
def test_equals_exact_arithmetic(kind, rounding, width, group):
    values = numbers(kind, 4, width)
    codes, scales = QUANTIZE(values, group=group, rounding=rounding)
    assert codes.shape == values.shape and scales.shape == (4, math.ceil(width / group))
    for row in range(4):
        for number, part in enumerate(values[row].split(group)):
            byte, want = mxfp8(part.tolist(), rounding)
            assert scales[row, number].item() == byte
            assert codes[row, number * group :][:group].tolist() == want


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_types_are_widened_first(dtype):
    """One scale arithmetic, in fp32: a bf16 row and its fp32 copy give the same bits."""
    values = (torch.randn(16, 160) * torch.exp2(torch.randint(-12, 12, (16, 1)))).to(dtype)
    for rounding in ("rceil", "floor"):
        narrow, wide = QUANTIZE(values, rounding=rounding), QUANTIZE(values.float(), rounding=rounding)
        assert all(torch.equal(a, b) for a, b in zip(narrow, wide, strict=True))


@pytest.mark.parametrize(("width", "group"), [(128, 32), (200, 32), (192, 128)])
def test_reading_back_is_exact(width, group):
    values = torch.cat([numbers(kind, 2, width) for kind in ("random", "bits", "tiny", "subnormal", "zero")])
    codes, scales = QUANTIZE(values, group=group)
    back = mxfp8_dequantize(codes, scales, group=group)
    for row, column in ((r, c) for r in range(values.shape[0]) for c in range(width)):
        code, byte, got = codes[row, column].item(), scales[row, column // group].item(), back[row, column].item()
        if byte == 255:
            assert code == 0x7F and math.isnan(got)
            continue
        want = e4m3_value(code & 0x7F) * Fraction(2) ** (byte - 127) * (-1 if code & 0x80 else 1)
        assert math.isinf(got) if abs(want) >= 2**128 else Fraction(got) == want
    assert (
        torch.equal(back, mxfp8_dequantize(codes.view(torch.float8_e4m3fn), scales, group=group)) or back.isnan().any()
    )


def test_a_nan_scale_makes_the_whole_group_nan_whatever_its_elements():
    back = mxfp8_dequantize(
        torch.tensor([[0, 0x38, 0, 0x38]], dtype=torch.uint8), torch.tensor([[255, 128]]).byte(), group=2
    )
    assert back[0, :2].isnan().all() and back[0, 2:].tolist() == [0.0, 2.0]


@pytest.mark.parametrize("rounding", ["rceil", "floor"])
def test_infinities_come_back_as_infinities(rounding):
    codes, scales = QUANTIZE(torch.tensor([[math.inf, 1.0, -math.inf, 0.0]]), group=4, rounding=rounding)
    assert codes.tolist() == [[0x7E, 0, 0xFE, 0]]
    assert mxfp8_dequantize(codes, scales, group=4).tolist() == [[math.inf, 0.0, -math.inf, 0.0]]


def test_rceil_never_saturates_and_errs_by_a_sixteenth_at_most():
    values = torch.randn(256, 128) * torch.exp2(torch.randint(-60, 60, (256, 1)))
    codes, scales = QUANTIZE(values)
    back = mxfp8_dequantize(codes, scales)
    limit = (values.abs() / 16).maximum(
        values.unflatten(-1, (4, 32)).abs().amax(-1).repeat_interleave(32, -1) * 2.0**-17
    )
    assert ((back - values).abs() <= limit).all()
    again = QUANTIZE(back)
    assert torch.equal(mxfp8_dequantize(*again), back)  # what was quantised once stays


def test_rows_do_not_see_each_other_and_strides_do_not_matter():
    """Rows of garbage beside live ones, and a transposed tensor."""
    live = torch.randn(3, 70)
    padded = torch.cat([live, torch.tensor([[1e38], [math.nan]]).expand(2, 70)])
    for got, want in zip(QUANTIZE(padded), QUANTIZE(live), strict=True):
        assert torch.equal(got[:3], want)
    live = torch.randn(3, 1, 64)
    turned = live.transpose(0, 2).contiguous().transpose(0, 2)
    assert not turned.is_contiguous()
    for group in (32, 64, 20):
        for got, want in zip(QUANTIZE(turned, group=group), QUANTIZE(live, group=group), strict=True):
            assert torch.equal(got, want) and got.stride() == torch.empty(got.shape).stride()


def test_smaller_groups_keep_more_beside_outliers():
    """E4M3 spans 2^18, so only an outlier of ten thousands pushes its neighbours out of the normal numbers."""
    values = torch.randn(512, 128)
    values[:, 5] *= 1e5
    errors = [
        (mxfp8_dequantize(*QUANTIZE(values, group=group), group=group) - values)[:, 32:].square().mean().item()
        for group in (32, 128)
    ]
    assert 5 * errors[0] < errors[1]


def test_empty_tensors():
    for shape, scales in (((0, 64), (0, 2)), ((2, 0), (2, 0))):
        got = QUANTIZE(torch.zeros(shape))
        assert [tuple(part.shape) for part in got] == [shape, scales]


@pytest.mark.parametrize(
    ("x", "attributes", "message"),
    [
        (torch.zeros(4, dtype=torch.float64), {}, "x is torch.float64, want torch.float32"),
        (torch.zeros(4, dtype=torch.int32), {}, "x is torch.int32"),
        (torch.zeros(()), {}, "x has no dim to group"),
        (torch.zeros(4), {"group": 0}, "group is 0, want at least 1"),
        (torch.zeros(4), {"rounding": "even"}, "rounding is 'even', want 'rceil' or 'floor'"),
    ],
)
def test_what_cannot_be_quantised(x, attributes, message):
    for function in (OPERATORS["mxfp8_quantize"].fake, QUANTIZE):
        with pytest.raises(ValueError, match=f"mxfp8_quantize: {message}"):
            function(x, **attributes)


def test_scales_of_another_shape_are_refused():
    with pytest.raises(ValueError, match=r"scales are torch.uint8 \[2, 1\], want torch.uint8 \[2, 2\]"):
        mxfp8_dequantize(torch.zeros(2, 64).byte(), torch.zeros(2, 1).byte())


def test_cost():
    x = torch.empty(3, 5, 200, dtype=torch.bfloat16)
    assert OPERATORS["mxfp8_quantize"].cost(x) == Cost(bytes=15 * (200 * 2 + 200 + 7), flops=3 * 15 * 200)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_the_reference_gives_the_same_bits_on_a_gpu(kind):
    values = numbers(kind, 64, 200)
    for rounding in ("rceil", "floor"):
        for here, there in zip(
            QUANTIZE(values, rounding=rounding), QUANTIZE(values.cuda(), rounding=rounding), strict=True
        ):
            assert torch.equal(here, there.cpu())
