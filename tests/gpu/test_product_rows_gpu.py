"""Products of few rows with their neighbours, and random programs with them, compiled and run on the GPU."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings

_PATH = Path(__file__).parents[1] / "interpreter" / "test_kernel_product_rows.py"
_SPEC = importlib.util.spec_from_file_location("interpreted_product_rows", _PATH)
assert _SPEC is not None and _SPEC.loader is not None
SHARED: Any = importlib.util.module_from_spec(_SPEC)
sys.modules[_SPEC.name] = SHARED
_SPEC.loader.exec_module(SHARED)
kernel_of = SHARED.kernel_of


@pytest.mark.gpu
@pytest.mark.parametrize("lines", [1, 2, 8])
@pytest.mark.parametrize("name", SHARED.CASES)
def test_a_product_with_its_neighbours_is_what_eager_computes(name: str, lines: int, kernel_of: Any) -> None:
    torch.manual_seed(lines)
    function, operands = SHARED.CASES[name]
    moved = [tensor.cuda() for tensor in operands(lines)]
    SHARED.SHARED.check(SHARED.build(function, moved), function, moved, kernel_of)


@pytest.mark.gpu
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(program=SHARED.programs())
def test_random_programs_with_products_on_kernels(program: Any, kernel_of: Any) -> None:
    SHARED.SHARED.check_program(program, kernel_of, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("captured", [False, True])
def test_launches_that_start_early_read_what_the_one_before_wrote(captured: bool, kernel_of: Any) -> None:
    """A chain of products, each over the rows that the launch before it made, in one stream or in a CUDA graph."""
    torch.manual_seed(0)
    width, steps = 2048, 24
    row = torch.randn(1, 1, width, device="cuda").bfloat16()
    weights = [(torch.randn(width, width, device="cuda") * width**-0.5).bfloat16() for _ in range(steps)]
    function = SHARED.CASES["residual"][0]
    tiles = SHARED.ProductTiles("stream", 4, (width,), 4, 1, early=True)
    launch = kernel_of(SHARED.build(function, [row, weights[0], row], tiles)).launch

    def chain() -> list[torch.Tensor]:
        rows = [row]
        for weight in weights:
            rows.append(launch(rows[-1], weight, row, memory=torch))
        return rows

    found = chain()
    for _ in range(20):
        if captured:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                found = chain()
            graph.replay()
        else:
            found = chain()
        torch.cuda.synchronize()
        for before, after, weight in zip(found[:-1], found[1:], weights, strict=True):
            wanted = function(before, weight, row)
            assert float((after - wanted).float().norm() / wanted.float().norm()) < 6e-3
