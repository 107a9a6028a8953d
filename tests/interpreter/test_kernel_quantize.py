"""The quantisers: bit by bit the references' codes and scales, for any sizes and strides."""

import pytest
import torch

from kimigraph.ir.reference.fp8_quantize import fp8_quantize
from kimigraph.ir.reference.mxfp8_quantize import mxfp8_quantize


def values(*shape, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    return (x * torch.exp2(torch.randint(-12, 9, (*shape[:-1], 1), generator=generator).float())).to(dtype)


def strided(x):
    """The same values with the last two of the leading dims exchanged in memory."""
    return x.transpose(0, 1).contiguous().transpose(0, 1)


def run(kernel, device, op, x, **attributes):
    x = x.to(device)
    module = kernel(op, {"x": x}, attributes)
    got = [part.cpu() for part in module.launch(x)]
    reference = mxfp8_quantize if op == "mxfp8_quantize" else fp8_quantize
    want = reference(x.cpu(), **attributes)
    for part, wanted in zip(got, want, strict=True):
        assert part.dtype == wanted.dtype and part.shape == wanted.shape and part.is_contiguous()
        assert torch.equal(part.view(torch.uint8), wanted.view(torch.uint8))
    return got


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("shape", "group"), [((3, 2, 4, 128), 32), ((5, 72), 32), ((7, 24), 12), ((2, 33), 64)])
@pytest.mark.parametrize("layout", [torch.clone, strided])
@pytest.mark.parametrize("rounding", ["rceil", "floor"])
def test_mxfp8(kernel, device, dtype, shape, group, layout, rounding):
    run(kernel, device, "mxfp8_quantize", layout(values(*shape, dtype=dtype)), group=group, rounding=rounding)


@pytest.mark.parametrize("scales", ["power2", "amax"])
@pytest.mark.parametrize(("shape", "tile"), [((2, 1, 4, 128), 128), ((3, 160), 128), ((4, 3, 96), 32)])
def test_fp8(kernel, device, scales, shape, tile):
    run(kernel, device, "fp8_quantize", strided(values(*shape, seed=3)), tile=tile, scales=scales)


@pytest.mark.parametrize("op", ["mxfp8_quantize", "fp8_quantize"])
def test_rotated_rows(kernel, device, op):
    x = strided(values(2, 3, 128, seed=5, dtype=torch.bfloat16))
    run(
        kernel,
        device,
        op,
        x,
        rotate=True,
        **({"group": 32} if op == "mxfp8_quantize" else {"tile": 128, "scales": "amax"}),
    )


def test_what_is_no_number_stays_in_its_group(kernel, device):
    """G5: NaN and both infinities, in the kernel as in the reference."""
    x = values(1, 160)
    x[0, 0], x[0, 40], x[0, 70], x[0, 96:128] = float("nan"), float("inf"), float("-inf"), 0.0
    codes, scales = run(kernel, device, "mxfp8_quantize", x, group=32)
    assert scales[0].tolist()[:4] == [255, 254, 254, 0] and not (codes[0, 32:] & 0x7F == 0x7F).any()
    run(kernel, device, "fp8_quantize", x, tile=32, scales="power2")


def test_exponents_from_the_bits(kernel, device):
    """G4: just above a power of two, at all exponents: a logarithm rounds some of them down."""
    exponents = torch.arange(-126, 127).float()
    x = (torch.exp2(exponents) * (1 + 2.0**-23)).unsqueeze(1)
    run(kernel, device, "mxfp8_quantize", x, group=1)


def test_padding_rows_touch_nothing(kernel, device):
    """G12: a tail of NaN and huge values leaves the live rows' codes as they are."""
    x = values(8, 64, seed=9)
    alone = run(kernel, device, "mxfp8_quantize", x[:3].clone(), group=32)
    x[3:6], x[6:] = 1e38, float("nan")
    both = run(kernel, device, "mxfp8_quantize", x, group=32)
    assert all(torch.equal(part[:3], one) for part, one in zip(both, alone, strict=True))


def test_scales_are_fp32_whatever_the_input_is(kernel, device):
    """G8: a bf16 amax over 448 is no bf16 number; the scale is the fp32 quotient, as the writers take it."""
    x = torch.zeros(1, 128, dtype=torch.bfloat16)
    x[0, 5] = 96.0
    _, scales = run(kernel, device, "fp8_quantize", x, tile=128, scales="amax")
    assert scales.item() == torch.tensor(96.0).div(448.0).item() != scales.bfloat16().float().item()


def test_nothing_to_do(kernel, device):
    run(kernel, device, "mxfp8_quantize", values(0, 64), group=32)
