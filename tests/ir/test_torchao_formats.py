"""``mxfp8_quantize`` beside torchao's MX conversion on the same data; without torchao there is nothing to compare."""

import math

import pytest
import torch

from kimigraph.ir.reference.mxfp8_quantize import mxfp8_dequantize

pytest.importorskip("torchao", reason="torchao is not installed: the comparison with its MX formats is left out")
mx_tensor = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")


def theirs(values, rounding, group):
    mode = mx_tensor.ScaleCalculationMode[rounding.upper()]
    scales, elements = mx_tensor.to_mx(values, torch.float8_e4m3fn, group, mode)
    return elements.view(torch.uint8), scales.view(torch.uint8)


def data(kind, width):
    values = torch.randn(64, width)
    random_exponents = torch.exp2(torch.randint(-100, 100, (64, 1)))
    return {
        "random": values,
        "all exponents": values * random_exponents,
        "subnormal": torch.randint(0, 2**23, (64, width)).to(torch.int32).view(torch.float32) * values.sign(),
        "huge": values.clamp(-2, 2) * 1.7e38,
        "zero": torch.where(values > 0, 0.0, -0.0),
        "nan": torch.where(torch.rand(64, width) < 0.01, math.nan, values),
        "infinite": torch.where(torch.rand(64, width) < 0.01, math.inf, values) * values.sign(),
        "subnormal elements": torch.where(torch.rand(64, width) < 0.5, values * 1e-40, values),
    }[kind]


KINDS = ("random", "all exponents", "subnormal", "huge", "zero", "nan", "infinite", "subnormal elements")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("group", [32, 128, 20])
@pytest.mark.parametrize("rounding", ["rceil", "floor"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_bits(kind, rounding, group, dtype):
    """All scales are equal, and all elements of groups whose scale is neither 2^-127 nor NaN.

    Below 2^-126 torchao divides by another number than the scale it returns, or not at all, which loses the values;
    MX 1.0 divides by the scale. Under a NaN scale elements mean nothing; here they are all NaN.
    """
    values = data(kind, 640).to(dtype)
    codes, scales = torch.ops.kimigraph.mxfp8_quantize(values, group=group, rounding=rounding)
    their_codes, their_scales = theirs(values, rounding, group)
    assert torch.equal(scales, their_scales)
    plain = ((scales > 0) & (scales < 255)) | (values.unflatten(-1, (-1, group)) == 0).all(-1)
    assert plain.any() or kind == "subnormal"
    chosen = plain.repeat_interleave(group, -1)
    assert torch.equal(codes[chosen], their_codes[chosen])
    lost = (scales == 255).repeat_interleave(group, -1)
    assert mxfp8_dequantize(codes, scales, group=group)[lost].isnan().all()


def test_where_rceil_differs_the_exact_scale_is_the_larger_one():
    """One ulp above 448 * 2^e: torchao's log2 rounds to e where e is large, and the group saturates."""
    exponents = torch.arange(-118, 119)
    values = (torch.exp2(exponents.double()) * 448).float().nextafter(torch.tensor(torch.inf)).unsqueeze(-1)
    _, scales = torch.ops.kimigraph.mxfp8_quantize(values, group=1)
    _, their_scales = theirs(values, "rceil", 1)
    assert torch.equal(scales[:, 0].int(), exponents.int() + 128)
    assert (their_scales <= scales).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["random", "all exponents", "huge", "zero"])
def test_mxfp4_has_the_same_bytes(kind, dtype):
    """Two codes a byte, the first below, under the scales of section 6.3."""
    values = data(kind, 640).to(dtype)
    their_scales, their_codes = mx_tensor.to_mx(
        values, torch.float4_e2m1fn_x2, 32, mx_tensor.ScaleCalculationMode.FLOOR
    )
    plane = torch.ops.kimigraph.mxfp4_quantize(values).flatten()
    codes, scales = plane.split([64 * 320, 64 * 20])
    assert torch.equal(scales.view(64, 20), their_scales.view(torch.uint8))
    assert torch.equal(codes.view(64, 320), their_codes.view(torch.uint8))
