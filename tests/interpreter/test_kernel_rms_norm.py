"""The kernel of an RMS norm that stands alone, for every operand and stride that the operator allows."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("weighted", "summed", "first"), [(True, True, False), (True, False, True), (False, True, False)]
)
def test_it_computes_what_the_reference_does(
    kernel: Callable[..., ModuleType], device: str, dtype: torch.dtype, weighted: bool, summed: bool, first: bool
) -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 2, 40, device=device).to(dtype)[..., :36]
    operands: dict[str, Any] = {
        "x": x,
        "weight": torch.randn(36, device=device) if weighted else None,
        "residual": torch.randn(2, 3, 36, device=device).to(dtype).transpose(0, 1) if summed else None,
    }
    attributes = {"eps": 1e-3, "rounds_first": first}
    found = kernel("rms_norm", operands, attributes).launch(*operands.values())
    wanted = torch.ops.kimigraph.rms_norm(*operands.values(), **attributes)
    assert found.dtype is dtype and found.is_contiguous()
    limit = TOLERANCE[dtype]
    torch.testing.assert_close(found, wanted, rtol=limit, atol=limit)
