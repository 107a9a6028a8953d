"""A kernel as the compiler writes it, without a graph around it."""

import importlib.util
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from kimigraph.codegen.kernel import KernelRequest, TensorSpec
from kimigraph.codegen.specialize import BUILDERS


def kernel_for(op: str, tensors: Mapping[str, torch.Tensor | None], attributes: dict[str, Any]) -> ModuleType:
    """The imported kernel module that the compiler writes for this call on "cuda"; its ``launch`` takes the tensors."""
    specs = {name: None if tensor is None else _specification(tensor) for name, tensor in tensors.items()}
    built = BUILDERS[op](KernelRequest(op, specs, attributes, "cuda"))
    path = Path(tempfile.mkdtemp(prefix="kimigraph-bench-")) / f"{op}.py"
    path.write_text(built.text, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(f"{path.parent.name}.{op}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _specification(tensor: torch.Tensor) -> TensorSpec:
    return TensorSpec(tuple(tensor.shape), tensor.stride(), str(tensor.dtype).removeprefix("torch."))
