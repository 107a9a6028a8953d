"""``rms_norm``: the reference against torch's own in double precision, its roundings, and the shapes it refuses."""

import pytest
import torch
import torch.nn.functional as F

from kimigraph.ir.operators import OPERATORS

rms_norm = torch.ops.kimigraph.rms_norm


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("summed", [True, False])
def test_it_is_torch_s_norm_of_the_sum(weighted: bool, summed: bool) -> None:
    torch.manual_seed(0)
    x, residual, weight = torch.randn(2, 3, 16), torch.randn(2, 3, 16) * 2, torch.randn(16)
    found = rms_norm(x, weight if weighted else None, residual if summed else None, eps=1e-3)
    total = (x + residual if summed else x).double()
    wanted = F.rms_norm(total, (16,), weight.double() if weighted else None, 1e-3)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-6, atol=1e-6)


def test_where_it_rounds() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(64, 48).bfloat16(), torch.randn(48).bfloat16()
    wide = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-5)
    last, first = rms_norm(x, weight, eps=1e-5), rms_norm(x, weight, eps=1e-5, rounds_first=True)
    assert torch.equal(last, (wide * weight.float()).bfloat16())
    assert torch.equal(first, wide.bfloat16() * weight)
    assert not torch.equal(first, last)
    residual = torch.randn(64, 48).bfloat16() * 1e-2
    assert torch.equal(rms_norm(x, weight, residual, eps=1e-5), rms_norm(x + residual, weight, eps=1e-5))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": torch.ones(5)}, r"weight is \[5\], want \[6\]"),
        ({"residual": torch.ones(1, 6)}, r"residual is torch.float32\[1, 6\], x torch.float32\[2, 6\]"),
        ({"residual": torch.ones(2, 6).bfloat16()}, r"residual is torch.bfloat16"),
        ({"x": torch.ones(())}, "no dim to reduce"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, torch.Tensor], message: str) -> None:
    given = {"x": torch.ones(2, 6), "weight": torch.ones(6), "residual": torch.ones(2, 6)} | change
    with pytest.raises(ValueError, match=message):
        OPERATORS["rms_norm"].fake(*given.values(), eps=1e-5)


def test_its_cost_is_what_it_moves() -> None:
    x = torch.ones(4, 8, dtype=torch.bfloat16)
    cost = OPERATORS["rms_norm"].cost(x, torch.ones(8), x, eps=1e-5)
    assert cost.bytes == 3 * 64 + 32 and cost.flops == 5 * 32
