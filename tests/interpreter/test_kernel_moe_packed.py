"""Routed experts over MXFP4 weights: both forms of the kernel against the reference, which reads the same bytes."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

from kimigraph.codegen.kernel import KernelRequest, TensorSpec
from kimigraph.codegen.specialize import moe_experts as builder
from kimigraph.ir.errors import CompileError
from kimigraph.ir.reference.moe_experts import moe_experts
from kimigraph.ir.reference.mxfp4_quantize import mxfp4_dequantize, mxfp4_quantize

ATTRIBUTES: dict[str, Any] = {
    "picks": 2, "renormalize": True, "scale": 1.3, "groups": 1, "group_picks": 1, "activation": "situ", "beta": 4.0,
    "linear_beta": 25.0, "limit": None, "eps": 1e-5,
}  # fmt: skip
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2}


def operands(
    tokens: int, dtype: torch.dtype, follows: bool = True, inner: int = 64, width: int = 96, experts: int = 6
) -> dict[str, torch.Tensor | None]:
    """Weights whose groups differ by binades; some groups are zero."""
    generator = torch.Generator().manual_seed(tokens)

    def normal(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=generator)

    def weight(*sizes: int) -> torch.Tensor:
        groups = (normal(*sizes) * sizes[-1] ** -0.5).unflatten(-1, (-1, 32))
        groups *= torch.randint(-3, 3, (*groups.shape[:-1], 1), generator=generator).float().exp2()
        groups[..., :1, 0, :] = 0
        return mxfp4_quantize(groups.flatten(-2))

    last = 40
    given: dict[str, torch.Tensor | None] = {
        "x": normal(tokens, 2 * width).to(dtype)[:, :width],
        "logits": normal(tokens, experts),
        "bias": normal(experts) * 0.3,
        "gate_up": weight(experts, 2 * inner, width),
        "down": weight(experts, width, inner),
        "norm_weight": (1 + 0.1 * normal(width)).to(dtype),
        "up": (normal(last, width) * width**-0.5).to(dtype),
        "shared_gate": normal(tokens, 13).to(dtype),
        "shared_up": normal(tokens, 13).to(dtype),
        "shared_down": normal(last, 13).to(dtype),
        "residual": normal(tokens, last).to(dtype),
    }
    behind = ("norm_weight", "up", "shared_gate", "shared_up", "shared_down", "residual")
    return given if follows else given | dict.fromkeys(behind)


@pytest.mark.parametrize(
    ("tokens", "inner", "follows", "dtype"),
    [
        (1, 64, True, torch.bfloat16),
        (1, 96, False, torch.float32),
        (2, 32, True, torch.float32),
        (3, 64, False, torch.float32),
        (19, 32, True, torch.bfloat16),
    ],
)
def test_it_computes_what_the_reference_does(
    kernel: Callable[..., ModuleType], tokens: int, inner: int, follows: bool, dtype: torch.dtype
) -> None:
    given = operands(tokens, dtype, follows, inner)
    module = kernel("moe_experts", given, ATTRIBUTES)
    assert hasattr(module, "open_packed") == (tokens <= 2 and follows)
    out, chosen = module.launch(*given.values())
    wanted, picks = moe_experts(*given.values(), **ATTRIBUTES)
    assert torch.equal(chosen, picks) and wanted.count_nonzero() > 0
    limit = TOLERANCE[dtype]
    torch.testing.assert_close(out, wanted, rtol=limit, atol=limit * float(wanted.float().abs().max()))


@pytest.mark.parametrize("tokens", [1, 5])
def test_every_code_under_every_kind_of_scale(kernel: Callable[..., ModuleType], tokens: int) -> None:
    """One expert, whose second product shows each code of its columns by itself; scales from 2 ** -47 to 2 ** 46."""
    given = operands(tokens, torch.float32, False, 32, 32, 1)
    scales = torch.arange(32, dtype=torch.uint8) * 3 + 80
    codes = torch.arange(32, dtype=torch.uint8).expand(32, 32) & 15
    packed = codes[:, ::2] | codes[:, 1::2] << 4
    given["down"] = torch.cat([packed.flatten(), scales]).view(1, 32, 17)
    attributes = ATTRIBUTES | {"picks": 1}
    out, _ = kernel("moe_experts", given, attributes).launch(*given.values())
    wanted, _ = moe_experts(*given.values(), **attributes)
    torch.testing.assert_close(out, wanted, rtol=2e-5, atol=0.0)
    real = given | {name: mxfp4_dequantize(given[name]) for name in ("gate_up", "down")}
    assert torch.equal(moe_experts(*real.values(), **attributes)[0], wanted)


def test_what_kernels_cannot_read_is_refused() -> None:
    given = operands(2, torch.bfloat16)
    specs = {
        name: None if t is None else TensorSpec(tuple(t.shape), t.stride(), str(t.dtype).removeprefix("torch."))
        for name, t in given.items()
    }
    half = specs | {"x": TensorSpec((2, 96), (192, 1), "float16")}
    with pytest.raises(CompileError, match="exceed float16"):
        builder.build(KernelRequest("moe_experts", half, ATTRIBUTES))
    odd = specs | {"gate_up": TensorSpec((6, 126, 51), (126 * 51, 51, 1), "uint8")}
    with pytest.raises(CompileError, match="multiples of 16 bytes"):
        builder.build(KernelRequest("moe_experts", odd, ATTRIBUTES))
