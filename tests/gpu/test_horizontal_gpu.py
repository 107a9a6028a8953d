"""Horizontal regions on the GPU: the interpreter's cases, and products at the widths of K3.1."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch

from kimigraph.bench.prolog import GROUPS

pytestmark = pytest.mark.gpu


def cases_of(name: str) -> ModuleType:
    """The interpreter's test module; its tests take the device from a fixture."""
    path = Path(__file__).parents[1] / "interpreter" / f"test_kernel_{name}.py"
    spec = importlib.util.spec_from_file_location(f"cases_{name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    globals().update(
        {test.replace("test_", f"test_{name}_", 1): f for test, f in vars(module).items() if "test_" in test}
    )
    return module


PRODUCTS = cases_of("products")
cases_of("combined")


@pytest.mark.parametrize("rows", [1, 2, 5, 8])
@pytest.mark.parametrize("group", GROUPS)
def test_products_at_the_widths_of_a_model(tmp_path: Path, device: str, group: str, rows: int) -> None:
    depth, columns, wide = GROUPS[group]
    bf16 = torch.bfloat16
    weights = [PRODUCTS.draw(1, sum(columns), depth, dtype=bf16)]
    weights += [PRODUCTS.draw(2, wide, depth)] if wide else []
    PRODUCTS.check(tmp_path, device, PRODUCTS.draw(3, rows, 1, depth, dtype=bf16), weights)
