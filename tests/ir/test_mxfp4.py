"""MXFP4 by the format itself: every code, ties, scales by exponent bits, what comes from MXFP4 comes back."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kimigraph.ir.preparation import prepare
from kimigraph.ir.reference.e8m0 import from_e8m0
from kimigraph.ir.reference.mxfp4_quantize import E2M1, joined_planes, mxfp4_columns, mxfp4_dequantize, mxfp4_quantize


def quantised(*values):
    """What is left of the first numbers of a group whose largest is 4, so that its scale is 1."""
    row = torch.zeros(1, 32)
    row[0, 0], row[0, 1 : len(values) + 1] = 4.0, torch.tensor(values)
    return mxfp4_dequantize(mxfp4_quantize(row))[0, 1 : len(values) + 1].tolist()


def test_the_sixteen_numbers_and_their_places():
    codes = torch.arange(32, dtype=torch.uint8).view(1, 32) & 15
    plane = joined_planes(codes, torch.tensor([[127]], dtype=torch.uint8))
    assert plane.shape == (1, 17) and plane[0, :2].tolist() == [0x10, 0x32] and plane[0, 16] == 127
    assert mxfp4_dequantize(plane)[0].tolist() == [*E2M1, *(-x for x in E2M1)] * 2


def test_rounding_is_to_the_nearest_ties_to_even_and_at_most_six():
    assert quantised(0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0) == [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]
    assert quantised(0.26, 0.74, 1.26, 1.74, 2.6, 3.4, 5.1, 7.9) == [0.5, 0.5, 1.5, 1.5, 3.0, 3.0, 6.0, 6.0]
    assert quantised(-0.74, -5.1, -0.0) == [-0.5, -6.0, 0.0]


def test_scales_come_from_exponent_bits():
    """A largest magnitude just above and below a power of two; zeros; a NaN; what is below the smallest scale."""
    rows = torch.zeros(5, 32)
    rows[0, 3], rows[1, 3], rows[3, 3] = 2.0**20 * (1 + 2**-23), 2.0**20 * (1 - 2**-24), float("nan")
    rows[4, 3] = 2.0**-126
    scales = mxfp4_quantize(rows).flatten()[5 * 16 :]
    assert scales.tolist() == [127 + 18, 127 + 17, 0, 255, 0]
    left = mxfp4_dequantize(mxfp4_quantize(rows))
    assert left[2].count_nonzero() == 0 and left[3].isnan().all() and left[4, 3] == 2.0**-126


@given(st.integers(0, 2**32 - 1))
def test_what_comes_from_mxfp4_loses_nothing(seed):
    random = torch.Generator().manual_seed(seed)
    most = int(torch.randint(1, 16, (), generator=random))
    codes = torch.randint(0, most + 1, (3, 4, 64), generator=random, dtype=torch.uint8)
    scales = torch.randint(4, 250, (3, 4, 2), generator=random, dtype=torch.uint8)
    values = mxfp4_dequantize(joined_planes(codes, scales))
    table = torch.tensor([*E2M1, *(-x for x in E2M1)])
    want = table[codes.int()] * from_e8m0(scales).repeat_interleave(32, -1)
    assert torch.equal(values, want)
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(values.to(dtype).float(), values)
        assert torch.equal(mxfp4_dequantize(mxfp4_quantize(values.to(dtype))), values)


def test_a_program_prepares_what_the_operator_computes():
    weight = torch.randn(3, 5, 96) * torch.randint(-200, 40, (3, 5, 3)).repeat_interleave(32, -1).float().exp2()
    weight[0, 1, :32], weight[1, 2, 40], weight[2, 0, 5] = 0, float("nan"), float("inf")
    for dtype in (torch.float32, torch.bfloat16):
        made = prepare([{"op": "mxfp4", "of": ["w"]}], {"w": weight.to(dtype)})
        assert torch.equal(made, torch.ops.kimigraph.mxfp4_quantize(weight.to(dtype)))


def test_rows_that_no_group_divides_are_refused():
    with pytest.raises(ValueError, match="a multiple of 17"):
        mxfp4_columns(33)
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode, pytest.raises(ValueError, match="C a multiple of 32"):
        torch.ops.kimigraph.mxfp4_quantize(mode.from_tensor(torch.zeros(4, 48)))
