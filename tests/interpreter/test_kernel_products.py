"""The kernel of a horizontal region of products, against fp64."""

import importlib.util
import itertools
from pathlib import Path

import pytest
import torch
from torch.fx import Graph, GraphModule
from torch.nn.functional import linear

from kimigraph.codegen.horizontal.products import Tiling, build_region

ATEN = torch.ops.aten
numbers = itertools.count()


def region(x: torch.Tensor, weights: list[torch.Tensor]) -> GraphModule:
    """A region of one product a weight; rows are cast to the weight's type where it differs."""
    graph = Graph()
    rows = graph.placeholder("x")
    rows.meta["val"] = x
    results = []
    for number, weight in enumerate(weights):
        operand = graph.placeholder(f"w{number}")
        operand.meta["val"] = weight
        left = rows
        if weight.dtype != x.dtype:
            left = graph.call_function(ATEN._to_copy.default, (rows,), {"dtype": weight.dtype})
            left.meta["val"] = x.to(weight.dtype)
        product = graph.call_function(ATEN.linear.default, (left, operand))
        product.meta["val"] = linear(left.meta["val"], weight)
        results.append(product)
    graph.output(results[0] if len(results) == 1 else tuple(results))
    return GraphModule(torch.nn.Module(), graph)


def launch(directory: Path, x: torch.Tensor, weights: list[torch.Tensor], tiling: Tiling | None = None):
    path = directory / f"products_{next(numbers)}.py"
    path.write_text(build_region(region(x, weights), tiling).text, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    results = module.launch(x, *weights)
    return [results] if isinstance(results, torch.Tensor) else list(results)


def check(
    directory: Path, device: str, x: torch.Tensor, weights: list[torch.Tensor], tiling: Tiling | None = None
) -> None:
    x, weights = x.to(device), [weight.to(device) for weight in weights]
    for weight, found in zip(weights, launch(directory, x, weights, tiling), strict=True):
        wanted = x.double() @ weight.double().t()
        assert found.dtype == weight.dtype and found.shape == wanted.shape and found.is_contiguous()
        tolerance = 1e-5 if weight.dtype == torch.float32 else 1e-2
        torch.testing.assert_close(found.double(), wanted, rtol=tolerance, atol=tolerance * wanted.abs().max().item())


def draw(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("rows", [1, 2, 3, 8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_types_and_rows(tmp_path: Path, device: str, rows: int, dtype: torch.dtype) -> None:
    weights = [draw(1, 20, 48, dtype=dtype), draw(2, 8, 48), draw(3, 33, 48, dtype=dtype)]
    check(tmp_path, device, draw(4, rows, 1, 48, dtype=dtype), weights)


@pytest.mark.parametrize("depth", [7, 64, 100, 513])
@pytest.mark.parametrize("rows", [1, 5])
def test_depths_that_no_step_divides(tmp_path: Path, device: str, rows: int, depth: int) -> None:
    bf16 = torch.bfloat16
    check(tmp_path, device, draw(5, rows, depth, dtype=bf16), [draw(6, 9, depth, dtype=bf16), draw(7, 5, depth)])


def test_one_weight_alone(tmp_path: Path, device: str) -> None:
    check(tmp_path, device, draw(8, 1, 32), [draw(9, 16, 32)])


def test_rows_far_apart(tmp_path: Path, device: str) -> None:
    """Columns of a wider tensor, as slices of a merged product are."""
    wide = draw(10, 4, 1, 100, dtype=torch.bfloat16)
    check(tmp_path, device, wide[..., 32:80], [draw(11, 24, 48, dtype=torch.bfloat16), draw(12, 8, 48)])


@pytest.mark.parametrize("rows", [1, 6])
def test_tilings_compute_the_same(tmp_path: Path, device: str, rows: int) -> None:
    bf16 = torch.bfloat16
    x, weights = draw(13, rows, 96, dtype=bf16), [draw(14, 40, 96, dtype=bf16), draw(15, 12, 96)]
    for tiling in (Tiling(16, 32, 64, 4), Tiling(32, 64, 128, 8, 2), Tiling(64, 16, 32, 2)):
        check(tmp_path, device, x, weights, tiling)
