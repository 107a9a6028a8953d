"""E4M3 and E8M0 conversions of the references against exact rational arithmetic."""

import math
from fractions import Fraction
from itertools import pairwise

import pytest
import torch
from exact_formats import MAGNITUDES, e4m3_code, scale_exponent

from kimigraph.ir.reference.cache_bytes import dequantise, quantise
from kimigraph.ir.reference.e4m3 import from_e4m3, to_e4m3
from kimigraph.ir.reference.e8m0 import e8m0_scales, from_e8m0, inverse_e8m0
from kimigraph.ir.reference.groups import join_groups, split_groups


def codes_of(values, overflow="saturate", dtype=torch.float32):
    return to_e4m3(torch.tensor(values, dtype=dtype), overflow).view(torch.uint8).tolist()


def test_all_256_codes_mean_what_the_specification_says():
    codes = torch.arange(256, dtype=torch.uint8)
    values = from_e4m3(codes)
    for code, value in enumerate(values.tolist()):
        if code & 0x7F == 0x7F:
            assert math.isnan(value)
        else:
            assert Fraction(value) == (MAGNITUDES[code & 0x7F] if code < 0x80 else -MAGNITUDES[code & 0x7F])
            assert math.copysign(1, value) == (1 if code < 0x80 else -1)
    assert float(MAGNITUDES[-1]) == 448 and MAGNITUDES[1] == Fraction(1, 512)
    again = to_e4m3(values).view(torch.uint8)
    assert torch.equal(again, torch.where(values.isnan(), 0x7F, codes))


@pytest.mark.parametrize("sign", [1, -1])
def test_midpoints_go_to_the_even_code_and_their_neighbours_to_the_nearer_one(sign):
    middles = [(low + high) / 2 for low, high in pairwise(MAGNITUDES)]
    exact = torch.tensor([sign * float(middle) for middle in middles])
    for direction in (-torch.inf, 0.0, torch.inf):
        values = exact if direction == 0.0 else exact.nextafter(torch.tensor(direction))
        want = [e4m3_code(Fraction(value)) for value in values.tolist()]
        assert codes_of(values.tolist()) == want
        if direction == 0.0:
            assert all(code % 2 == 0 for code in want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_random_values_of_all_exponents(dtype):
    values = (torch.randn(3000) * torch.exp2(torch.randint(-14, 12, (3000,)))).to(dtype)
    assert to_e4m3(values).view(torch.uint8).tolist() == [e4m3_code(Fraction(v)) for v in values.double().tolist()]


def test_beyond_the_largest_value():
    values = [448.0, 464.0, float.fromhex("0x1.d00002p+8"), 480.0, 3e38, math.inf, -math.inf, -465.0, math.nan]
    assert codes_of(values) == [0x7E] * 6 + [0xFE, 0xFE, 0x7F]
    assert codes_of(values, "nan") == [0x7E, 0x7E] + [0x7F] * 7
    assert codes_of([-math.nan, -0.0, 1e-45, -1e-45]) == [0x7F, 0x80, 0x00, 0x80]
    with pytest.raises(ValueError, match="overflow is 'wrap', want 'saturate' or 'nan'"):
        to_e4m3(torch.zeros(1), "wrap")


def test_codes_of_another_float8_are_refused():
    for dtype in (torch.float8_e4m3fnuz, torch.float8_e5m2):
        with pytest.raises(ValueError, match=rf"values are {dtype}, want torch.float8_e4m3fn"):
            from_e4m3(torch.zeros(4).to(dtype))


def test_every_scale_byte_and_its_inverse():
    """G2: byte 0 is 2 ** -127 and no zero, 255 is NaN."""
    bytes_ = torch.arange(256, dtype=torch.uint8)
    scales, inverses = from_e8m0(bytes_).tolist(), inverse_e8m0(bytes_).tolist()
    for byte in range(255):
        assert Fraction(scales[byte]) == Fraction(2) ** (byte - 127)
        assert Fraction(inverses[byte]) == Fraction(2) ** (127 - byte)
    assert math.isnan(scales[255]) and math.isnan(inverses[255])
    assert [scales[b].hex() for b in (0, 1, 127, 254)] == [(2.0**e).hex() for e in (-127, -126, 0, 127)]


@pytest.mark.parametrize("rounding", ["rceil", "floor"])
def test_scales_at_and_around_every_step(rounding):
    """Powers of two, 1.75 times them (where rceil steps) and their neighbours, subnormal ones too."""
    steps = torch.cat([torch.exp2(torch.arange(-149, 128).double()) * factor for factor in (1.0, 1.75)]).float()
    around = [steps, steps.nextafter(torch.tensor(torch.inf)), steps.nextafter(torch.tensor(0.0))]
    largest = torch.cat(around)
    largest = largest[largest.isfinite()]
    got = e8m0_scales(largest.unsqueeze(-1), rounding).tolist()
    assert got == [scale_exponent(Fraction(value), rounding) + 127 for value in largest.tolist()]
    assert torch.equal(e8m0_scales(-largest.unsqueeze(-1), rounding), e8m0_scales(largest.unsqueeze(-1), rounding))


def test_scales_of_what_is_no_number_and_of_nothing():
    """G5."""
    groups = torch.tensor([[0.0, -0.0], [math.nan, 1.0], [1.0, -math.nan], [math.inf, 1.0], [math.inf, math.nan]])
    assert e8m0_scales(groups, "rceil").tolist() == [0, 255, 255, 254, 255]
    assert e8m0_scales(groups, "floor").tolist() == [0, 255, 255, 247, 255]
    with pytest.raises(ValueError, match="rounding is 'even', want 'rceil' or 'floor'"):
        e8m0_scales(groups, "even")


def test_the_examples_that_tell_the_roundings_apart():
    """449 saturates under floor alone; 3.6 becomes 230.4 or 460.8; 300 is scaled alike."""
    largest = torch.tensor([[449.0], [3.6], [300.0]])
    for rounding, want in (("rceil", [224.5, 230.4, 300.0]), ("floor", [449.0, 460.8, 300.0])):
        scaled = largest[:, 0] * inverse_e8m0(e8m0_scales(largest, rounding))
        torch.testing.assert_close(scaled, torch.tensor(want))


def test_the_power_of_two_scales_of_caches_are_the_rceil_scales():
    """One plus an ulp at any exponent steps up, which ceil(log2) misses; above the caches' floor of 1e-4."""
    mantissas = torch.cat([torch.arange(0, 2**23, 97), 0x600000 + torch.arange(-2000, 2000)])
    for exponent in (-13, -1, 0, 8, 60, 99, 126):
        values = ((exponent + 127) << 23 | mantissas).to(torch.int32).view(torch.float32).unsqueeze(-1)
        assert torch.equal(quantise(values, 1, "power2")[1], from_e8m0(e8m0_scales(values, "rceil")).unsqueeze(-1))


@pytest.mark.parametrize(("width", "tile"), [(64, 128), (192, 128), (200, 128), (576, 128), (7, 3), (256, 128)])
@pytest.mark.parametrize("rule", ["amax", "power2"])
def test_tiles_with_fp32_scales_over_dims_that_are_no_multiple(width, tile, rule):
    values = torch.randn(3, 2, width)
    codes, scales = quantise(values, tile, rule)
    assert codes.shape == values.shape and scales.shape == (3, 2, math.ceil(width / tile))
    for number, part in enumerate(values.split(tile, -1)):  # each tile alone gives the same
        alone, scale = quantise(part.contiguous(), part.shape[-1], rule)
        assert torch.equal(scales[..., number : number + 1], scale)
        assert torch.equal(codes[..., number * tile :][..., :tile].view(torch.uint8), alone.view(torch.uint8))
        assert torch.equal(scale[..., 0], part.abs().amax(-1) / 448) == (rule == "amax")
    back = dequantise(codes.view(torch.uint8), scales, tile)
    limit = scales.repeat_interleave(tile, -1)[..., :width]
    assert ((back - values).abs() <= (values.abs() / 16).maximum(limit / 1024) * 1.0001).all()


def test_groups_split_and_join():
    values = torch.arange(10.0).view(2, 5)
    assert split_groups(values, 3).tolist() == [[[0, 1, 2], [3, 4, 0]], [[5, 6, 7], [8, 9, 0]]]
    for group in (1, 2, 3, 5, 8):
        assert torch.equal(join_groups(split_groups(values, group), 5), values)


@pytest.mark.parametrize(("value", "code"), [(math.inf, 0x7E), (-math.inf, 0xFE), (1e9, 0x7E), (-449.0, 0xFE)])
def test_the_cast_to_e4m3_that_quantisers_use_saturates(value, code):
    """G14: torch's own cast makes NaN of an infinity, the GPU's makes 448 of it; the reference is as the kernels."""
    assert to_e4m3(torch.tensor([value])).view(torch.uint8).item() == code
