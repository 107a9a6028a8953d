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
from kimigraph.ir.operators import OPERATORS
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
        if name.startswith("operator"):
            members += nodes
            continue
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
    order = [int(name.split("_")[0].removeprefix("x")) for name in placeholders]  # as inputs are called x0, x1 ...
    given, eager = [tensor.clone() for tensor in inputs], [tensor.clone() for tensor in inputs]
    found = module.launch(*(given[number] for number in order))
    wanted = function(*eager)
    found = [found] if isinstance(found, torch.Tensor) else list(found)
    wanted = [wanted] if isinstance(wanted, torch.Tensor) else list(wanted or ())
    for old, new in zip(wanted + eager, found + given, strict=True):
        tolerance = 1e-2 if old.dtype == BF16 else 1e-5
        torch.testing.assert_close(new, old, rtol=tolerance, atol=tolerance)
    return text


def draw(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def test_a_mask_of_positions_alone_beside_a_norm(tmp_path: Path, device: str) -> None:
    """A region that reads nothing: what it makes lies on the device that is current, also as part of another kernel."""

    def visible(x0: torch.Tensor, x1: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        columns = torch.arange(40, device=x0.device)
        return columns.unsqueeze(0) <= columns[:3].unsqueeze(1) + 7, x0 * x1

    inputs = (draw(0, 3, 40), draw(1, 40))
    text = check(tmp_path, device, visible, ["mask"] * 6 + ["scaled"], *inputs)
    assert '"cpu" if INTERPRET else "cuda"' in text or "'cpu' if INTERPRET else 'cuda'" in text


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


LATENT, KEYS = OPERATORS["latent_write"].overload, OPERATORS["index_key_write"].overload


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
@pytest.mark.parametrize("tokens", [1, 2])
def test_cache_writes_beside_a_norm(tmp_path: Path, device: str, tokens: int, dtype: torch.dtype) -> None:
    """As in a DSA layer: new rows go to caches of two kinds, with norms of their own; one row goes nowhere."""

    def step(x0: Any, x1: Any, x2: Any, x3: Any, x4: Any, x5: Any, x6: Any, x7: Any, x8: Any, x9: Any) -> Any:
        LATENT(x0, x1, x3, x4, x6, norm_weight=x7, norm_eps=1e-3)
        KEYS(x2, x5, x6, x8, x8, norm_eps=1e-4)
        return norm(x9, x7, 1e-5)

    caches = [draw(1, 3, 32, 24, dtype=dtype), draw(2, 3, 32, 8, dtype=dtype), draw(3, 3, 32, 16, dtype=dtype)]
    rows = [draw(4 + width, 3, tokens, width, dtype=BF16) for width in (24, 8, 16)]
    positions = torch.tensor([[2, 5], [0, -1], [31, 30]], dtype=torch.int32)[:, 2 - tokens :].contiguous()
    inputs = [*caches, *rows, positions, draw(5, 24, dtype=BF16), draw(6, 16, dtype=BF16), draw(7, 9, 24, dtype=BF16)]
    text = check(tmp_path, device, step, ["operator_0", "operator_1", *["a"] * 8], *inputs)
    assert text.count("tl.program_id(0)") == 1 and "part_2" in text


def test_cache_writes_alone(tmp_path: Path, device: str) -> None:
    """Without rope part and norms, positions of another type, nothing returned; the caches take what was written."""

    def step(x0: Any, x1: Any, x2: Any, x3: Any, x4: Any) -> Any:
        LATENT(x0, None, x2, None, x4)
        KEYS(x1, x3, x4)

    caches, rows = [draw(1, 2, 8, 20), draw(2, 2, 8, 6)], [draw(3, 2, 1, 20), draw(4, 2, 1, 6)]
    check(tmp_path, device, step, ["operator_0", "operator_1"], *caches, *rows, torch.tensor([[7], [3]]))


NORM = OPERATORS["rms_norm"].overload


@pytest.mark.parametrize("rounds_first", [False, True])
@pytest.mark.parametrize(("rows", "depth", "columns"), [(2, 64, 48), (8, 96, 70), (5, 1100, 33)])
def test_a_product_of_normed_rows_of_a_table(
    tmp_path: Path, device: str, rows: int, depth: int, columns: int, rounds_first: bool
) -> None:
    """Depths that no step divides, columns that no tile divides; the rows themselves are a result, too."""

    def step(x0: Any, x1: Any, x2: Any, x3: Any) -> Any:
        found = torch.nn.functional.embedding(x0, x1)
        normed = NORM(found, x2, eps=1e-3, rounds_first=rounds_first)
        return found, torch.nn.functional.linear(normed, x3)

    places = torch.randint(0, 11, (rows, 1), generator=torch.Generator().manual_seed(rows))
    inputs = [places, draw(1, 11, depth, dtype=BF16), draw(2, depth, dtype=BF16)]
    text = check(tmp_path, device, step, ["operator"] * 3, *inputs, draw(3, columns, depth, dtype=BF16) / depth**0.5)
    assert "def normed_lookup_dot(" in text
