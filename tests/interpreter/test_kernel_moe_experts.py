"""Routed experts: both forms of the kernel against the reference, at odd sizes, for every operand given or left out."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from kimigraph.codegen.kernel import KernelRequest, TensorSpec
from kimigraph.codegen.specialize import moe_experts as builder
from kimigraph.codegen.specialize import moe_sorted
from kimigraph.codegen.specialize.moe_sizes import Experts, Tile, Tiling
from kimigraph.ir.errors import CompileError
from kimigraph.ir.reference.moe_experts import moe_experts

ATTRIBUTES: dict[str, Any] = {
    "picks": 3, "renormalize": True, "scale": 1.3, "groups": 1, "group_picks": 1, "activation": "situ", "beta": 4.0,
    "linear_beta": 25.0, "limit": None, "eps": 1e-5,
}  # fmt: skip
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2}


def operands(
    tokens: int,
    dtype: torch.dtype,
    latent: bool = True,
    shared: bool = True,
    residual: bool = False,
    experts: int = 10,
    inner: int = 20,
) -> dict[str, torch.Tensor | None]:
    generator = torch.Generator().manual_seed(tokens)
    width, outer, wide = 24, 40, 13

    def normal(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=generator)

    def weight(*sizes: int) -> torch.Tensor:
        return (normal(*sizes) * sizes[-1] ** -0.5).to(dtype)

    last = outer if latent else width
    return {
        "x": normal(tokens, 2 * width).to(dtype)[:, :width],
        "logits": normal(tokens, experts + 2)[:, 2:],
        "bias": normal(experts) * 0.3,
        "gate_up": weight(experts, 2 * inner, width),
        "down": weight(experts, width, inner),
        "norm_weight": (1 + 0.1 * normal(width)).to(dtype) if latent else None,
        "up": weight(outer, width) if latent else None,
        "shared_gate": normal(tokens, wide).to(dtype) if shared else None,
        "shared_up": normal(tokens, 2 * wide).to(dtype)[:, wide:] if shared else None,
        "shared_down": weight(last, wide) if shared else None,
        "residual": normal(tokens, last + 3).to(dtype)[:, 3:] if residual else None,
    }


def check(module: ModuleType, given: dict[str, torch.Tensor | None], attributes: dict[str, Any]) -> None:
    out, chosen = module.launch(*given.values())
    wanted, picks = moe_experts(*given.values(), **attributes)
    assert torch.equal(chosen, picks)
    limit = TOLERANCE[out.dtype]
    torch.testing.assert_close(out, wanted, rtol=limit, atol=limit * float(wanted.float().abs().max()))
    again = module.launch(*given.values())[0]
    assert torch.equal(again, out)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("tokens", [1, 3, 17, 40])
@pytest.mark.parametrize(("latent", "shared"), [(True, True), (False, True), (True, False), (False, False)])
def test_it_computes_what_the_reference_does(
    kernel: Callable[..., ModuleType], dtype: torch.dtype, tokens: int, latent: bool, shared: bool
) -> None:
    given = operands(tokens, dtype, latent, shared)
    check(kernel("moe_experts", given, ATTRIBUTES), given, ATTRIBUTES)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("tokens", [1, 5, 17])
@pytest.mark.parametrize(("latent", "shared"), [(True, True), (False, False)])
def test_a_residual_is_added_behind_all(
    kernel: Callable[..., ModuleType], dtype: torch.dtype, tokens: int, latent: bool, shared: bool
) -> None:
    given = operands(tokens, dtype, latent, shared, residual=True)
    check(kernel("moe_experts", given, ATTRIBUTES), given, ATTRIBUTES)


@pytest.mark.parametrize("tokens", [2, 19])
@pytest.mark.parametrize(
    "change",
    [
        {"groups": 5, "group_picks": 2},
        {"activation": "swiglu", "limit": 0.7, "renormalize": False},
        {"linear_beta": None, "picks": 1},
        {"picks": 10},
    ],
)
def test_every_choice_and_activation(kernel: Callable[..., ModuleType], tokens: int, change: dict[str, Any]) -> None:
    given, attributes = operands(tokens, torch.float32), ATTRIBUTES | change
    check(kernel("moe_experts", given, attributes), given, attributes)


@pytest.mark.parametrize("tokens", [4, 20])
def test_ties_nan_and_experts_without_tokens(kernel: Callable[..., ModuleType], tokens: int) -> None:
    """Everybody picks the same three experts, by ties and around NaN; the others' weights must not be read."""
    given = operands(tokens, torch.float32)
    logits, bias, gate_up = given["logits"], given["bias"], given["gate_up"]
    assert logits is not None and bias is not None and gate_up is not None
    bias.zero_()
    logits[:] = -3.0
    logits[:, [2, 5, 7]] = 1.0
    logits[0, 1] = float("nan")
    gate_up[[0, 1, 3, 4, 6, 8, 9]] = float("nan")
    module = kernel("moe_experts", given, ATTRIBUTES)
    out, chosen = module.launch(*given.values())
    assert chosen.tolist() == [[2, 5, 7]] * tokens and out.isfinite().all()


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("dot", [False, True])
def test_other_tilings_compute_the_same(tmp_path: Any, parts: int, dot: bool) -> None:
    given = operands(2, torch.bfloat16)
    specs = specifications(given)
    tile = Tile(16, 16, 4, dot=dot, parts=parts)
    tiling = Tiling(tile, tile, Tile(16, 16, 4, lines=16, dot=True))
    text = builder.build(KernelRequest("moe_experts", specs, ATTRIBUTES), tiling).text
    check(imported(text, tmp_path / f"experts_{parts}_{dot}.py"), given, ATTRIBUTES)


@pytest.mark.parametrize("lines", [16, 32])
@pytest.mark.parametrize(
    ("shared", "change"),
    [(False, {}), (True, {"groups": 5, "group_picks": 2}), (True, {"activation": "swiglu", "limit": 0.7})],
)
def test_rows_laid_by_expert(tmp_path: Any, lines: int, shared: bool, change: dict[str, Any]) -> None:
    given, attributes = operands(37, torch.bfloat16, shared, shared, inner=24), ATTRIBUTES | change
    request = KernelRequest("moe_experts", specifications(given), attributes)
    tile = Tile(16, 16, 4, lines=lines)
    text = moe_sorted.build(request, Experts.of(request), moe_sorted.Cut(tile, tile, 16, 16)).text
    check(imported(text, tmp_path / f"sorted_{lines}_{shared}_{len(change)}.py"), given, attributes)


def specifications(given: dict[str, torch.Tensor | None]) -> dict[str, TensorSpec | None]:
    return {
        name: None if t is None else TensorSpec(tuple(t.shape), t.stride(), str(t.dtype).removeprefix("torch."))
        for name, t in given.items()
    }


def imported(text: str, path: Path) -> ModuleType:
    path.write_text(text, encoding="utf-8")
    module = ModuleType(path.stem)
    module.__file__ = str(path)
    exec(compile(text, str(path), "exec"), vars(module))
    return module


def test_mixed_types_are_refused() -> None:
    given = operands(2, torch.bfloat16)
    specs = specifications(given)
    down = specs["down"]
    assert down is not None
    specs["down"] = TensorSpec(down.shape, down.stride, "float32")
    with pytest.raises(CompileError, match="down is float32, x is bfloat16"):
        builder.build(KernelRequest("moe_experts", specs, ATTRIBUTES))
