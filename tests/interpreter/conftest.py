"""Fixtures of the kernel tests: a rendered kernel module from real tensors, on the CPU through Triton's interpreter."""

import importlib.util
import itertools
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import triton

from kimigraph.codegen.kernel import KernelRequest, TensorSpec
from kimigraph.codegen.specialize import BUILDERS

sys.path.insert(0, str(Path(__file__).parent))  # for the cases that several files share


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not triton.knobs.runtime.interpret:
        needs = pytest.mark.skip(reason="needs TRITON_INTERPRET=1 before triton is imported")
        for item in items:
            if item.path.parent == Path(__file__).parent:
                item.add_marker(needs)


class PoisonedTorch:
    """``torch`` for a kernel module; what it allocates starts as NaN, or as the integer bits of one."""

    def __init__(self, bits: int):
        self.bits = bits

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def empty(self, *arguments: Any, **options: Any) -> torch.Tensor:
        tensor = torch.empty(*arguments, **options)
        bits = self.bits & 0xFF if tensor.dtype == torch.uint8 else self.bits
        return tensor.fill_(torch.nan if tensor.is_floating_point() else bits)


@pytest.fixture
def device() -> str:
    return "cpu"


@pytest.fixture
def kernel(tmp_path: Path):
    """``kernel(op, tensors, attributes, poison=, target=, **options)`` -> the imported module of the rendered text."""
    number = itertools.count()

    def make(
        op: str,
        tensors: dict[str, torch.Tensor | None],
        attributes: dict[str, Any],
        poison: int = 0x7FC00000,
        target: str = "cpu",
        **options: Any,
    ) -> ModuleType:
        specs = {
            name: None
            if tensor is None
            else TensorSpec(tuple(tensor.shape), tensor.stride(), str(tensor.dtype).removeprefix("torch."))
            for name, tensor in tensors.items()
        }
        built = BUILDERS[op](KernelRequest(op, specs, attributes, target), **options)
        path = tmp_path / f"{op}_{next(number)}.py"
        path.write_text(built.text, encoding="utf-8")
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        poisoned = PoisonedTorch(poison)
        vars(module)["torch"] = poisoned
        if "memory" in (module.launch.__kwdefaults__ or {}):
            module.launch.__kwdefaults__["memory"] = poisoned
        return module

    return make
