"""The kernel of a horizontal region of pointwise regions, against the graph that it stands for."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import make_fx

from kimigraph.codegen.horizontal import build_region
from kimigraph.ir.purity import region_module
from kimigraph.ir.regions import extract_region

BF16 = torch.bfloat16


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


def built(function: Callable[..., Any], parts: list[str], *inputs: torch.Tensor) -> tuple[Any, Node]:
    """The horizontal region of ``function`` and its call; ``parts`` says to which region each operation belongs."""
    module = make_fx(function, tracing_mode="fake", pre_dispatch=True)(*inputs)
    calls = [node for node in module.graph.nodes if node.op == "call_function"]
    assert len(calls) == len(parts)
    members: list[Node] = []
    for name in dict.fromkeys(parts):
        nodes = [node for node, part in zip(calls, parts, strict=True) if part == name]
        call = extract_region(module, nodes, name, "pointwise")
        members += [call, *(user for user in call.users if isinstance(call.meta["val"], tuple))]
    return module, extract_region(module, members, "horizontal_0", "horizontal")


def check(directory: Path, device: str, function: Callable[..., Any], parts: list[str], *inputs: torch.Tensor) -> str:
    """Hold the kernel's results and the inputs afterwards against eager; returns the kernel's text."""
    inputs = tuple(tensor.to(device) for tensor in inputs)
    _, call = built(function, parts, *inputs)
    child = region_module(call)
    assert child is not None
    text = build_region(child).text
    path = directory / "combined.py"
    path.write_text(text, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("combined", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    placeholders = [node.name for node in child.graph.nodes if node.op == "placeholder"]
    order = [int(name.split("_")[0].removeprefix("x")) for name in placeholders]
    given, eager = [tensor.clone() for tensor in inputs], [tensor.clone() for tensor in inputs]
    found = module.launch(*(given[number] for number in order))
    wanted = function(*eager)
    found = [found] if isinstance(found, torch.Tensor) else list(found)
    wanted = [wanted] if isinstance(wanted, torch.Tensor) else list(wanted)
    for old, new in zip(wanted + eager, found + given, strict=True):
        tolerance = 1e-2 if old.dtype == BF16 else 1e-5
        torch.testing.assert_close(new, old, rtol=tolerance, atol=tolerance)
    return text


def draw(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def test_norms_of_different_widths_and_a_scale(tmp_path: Path, device: str) -> None:
    """As behind the first products of a DSA layer; each member keeps its own eps, rows and columns."""

    def step(x0: torch.Tensor, x1: torch.Tensor, x2: torch.Tensor, x3: torch.Tensor, x4: torch.Tensor) -> Any:
        return norm(x0, x3, 1e-5), norm(x1, x4, 1e-3), x2 * 0.25

    inputs = [draw(1, 3, 1, 48, dtype=BF16), draw(2, 3, 1, 20, dtype=BF16), draw(3, 3, 64)]
    inputs += [draw(4, 48, dtype=BF16), draw(5, 20, dtype=BF16)]
    text = check(tmp_path, device, step, ["a"] * 8 + ["b"] * 8 + ["c"], *inputs)
    assert text.count("@triton.jit") >= 4 and "tl.program_id(0)" in text


def test_a_region_that_writes_beside_one_that_returns(tmp_path: Path, device: str) -> None:
    def step(x0: torch.Tensor, x1: torch.Tensor, x2: torch.Tensor) -> Any:
        x0.copy_(x1 * 2)
        return x2.sin() + 1

    check(tmp_path, device, step, ["a", "a", "b", "b"], draw(1, 4, 8), draw(2, 4, 8), draw(3, 40))


def test_several_results_of_one_member(tmp_path: Path, device: str) -> None:
    def step(x0: torch.Tensor, x1: torch.Tensor) -> Any:
        turned = x0.sin()
        return turned, turned * 2, x1.exp()

    check(tmp_path, device, step, ["a", "a", "b"], draw(1, 5, 7), draw(2, 300))


def test_small_products_of_different_sizes_beside_a_write(tmp_path: Path, device: str) -> None:
    def step(x0: torch.Tensor, x1: torch.Tensor, x2: torch.Tensor, x3: torch.Tensor, x4: torch.Tensor) -> Any:
        x4.mul_(3)
        linear = torch.nn.functional.linear
        return linear(x0, x1), linear(x2, x3) + 1

    inputs = [draw(1, 2, 40), draw(2, 9, 40), draw(3, 1, 12), draw(4, 30, 12), draw(5, 7)]
    check(tmp_path, device, step, ["w", "a", "b", "b"], *inputs)


@pytest.mark.parametrize("elements", [1, 129, 3000])
def test_members_of_very_different_sizes(tmp_path: Path, device: str, elements: int) -> None:
    check(tmp_path, device, lambda x0, x1: (x0.abs(), x1.neg()), ["a", "b"], draw(1, elements), draw(2, 7))
