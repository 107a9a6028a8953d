"""Runs an artifact: its program bound to weights on one device."""

import importlib.util
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from safetensors.torch import load_file

from kimigraph.ir.errors import CompileError, CorruptArtifactError, UsageError
from kimigraph.ir.manifest import Manifest
from kimigraph.ir.program import InputSpec

Step = Callable[..., tuple[torch.Tensor, ...]]


def device_of(target: str) -> torch.device:
    """The device that a target's programs run on."""
    return torch.device("cuda" if target.startswith("cuda") else "cpu")


def load_program(directory: Path) -> ModuleType:
    """Import ``program.py`` of an artifact under a module name of its own, so that many can live in one process."""
    path = directory / "program.py"
    spec = importlib.util.spec_from_file_location(f"kimigraph_program_{uuid.uuid4().hex}", path)
    if spec is None or spec.loader is None:
        raise CorruptArtifactError(f"{path} cannot be imported: compile the model again")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[spec.name]
        raise
    return module


class Executor:
    """A program bound to its weights.

    ``tensors`` maps the outside names of bound inputs (state-dict names) to tensors on the artifact's device. A call takes
    the caller's tensors (caches and inputs) in manifest order and returns the step's outputs; mutated ones change in place.
    """

    def __init__(self, directory: Path, tensors: dict[str, torch.Tensor]) -> None:
        self.manifest = Manifest.read(directory)
        self.manifest.verify_files(directory)
        self.device = device_of(self.manifest.target)
        if self.device.type == "cuda" and not torch.cuda.is_available():
            raise UsageError(
                f"{directory} was compiled for {self.manifest.target} and this machine has no CUDA device: "
                "run it where one is, or compile with --target cpu or cpu:reference"
            )
        self._step: Step = load_program(directory).step
        self._caller = tuple(spec for spec in self.manifest.inputs if not spec.bound)
        self._arguments: list[torch.Tensor | None] = self._bind(directory, tensors)
        self._slots = [index for index, spec in enumerate(self.manifest.inputs) if not spec.bound]

    def _bind(self, directory: Path, tensors: dict[str, torch.Tensor]) -> list[torch.Tensor | None]:
        constants = directory / "constants.bin"
        stored = load_file(constants) if constants.exists() else {}
        bound: list[torch.Tensor | None] = []
        missing: list[str] = []
        for spec in self.manifest.inputs:
            tensor = None
            if spec.bound:
                tensor = stored.get(spec.name) if spec.kind == "constant" else tensors.get(spec.source)
                if tensor is None:
                    missing.append(spec.source)
                else:
                    tensor = self._fit(spec, tensor.to(self.device))
            bound.append(tensor)
        if missing:
            names = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
            raise UsageError(f"the program needs weights that were not given: {names}")
        return bound

    @property
    def caller_inputs(self) -> tuple[InputSpec, ...]:
        """The inputs that a call takes, in order."""
        return self._caller

    def _fit(self, spec: InputSpec, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor as the program expects it; anything that would change its meaning is an error."""
        if tuple(tensor.shape) != spec.shape or str(tensor.dtype) != f"torch.{spec.dtype}":
            raise TypeError(
                f"{spec.source} is {tensor.dtype} {tuple(tensor.shape)}, the program was compiled for "
                f"torch.{spec.dtype} {spec.shape}: compile for this shape, or pass the tensor it expects"
            )
        if tensor.device.type != self.device.type:
            raise TypeError(f"{spec.source} is on {tensor.device}, the program runs on {self.device}: move it there")
        if _same_layout(tensor, spec):
            return tensor
        if spec.mutated:
            raise TypeError(
                f"{spec.source} has strides {tensor.stride()}, the program updates it in place with strides "
                f"{spec.stride}: allocate it as `Compiled.new_caches` does"
            )
        laid_out = torch.empty_strided(spec.shape, spec.stride, dtype=tensor.dtype, device=tensor.device)
        return laid_out.copy_(tensor)

    def __call__(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """One step."""
        if len(tensors) != len(self._caller):
            raise TypeError(f"the program takes {len(self._caller)} tensors, {len(tensors)} were given")
        arguments: list[Any] = list(self._arguments)
        for slot, spec, tensor in zip(self._slots, self._caller, tensors, strict=True):
            arguments[slot] = self._fit(spec, tensor)
        with torch.no_grad():
            outputs = self._step(*arguments)
        if len(outputs) != len(self.manifest.outputs):
            raise CompileError(f"the program returned {len(outputs)} tensors, its manifest lists {len(self.manifest.outputs)}")
        return outputs


def _same_layout(tensor: torch.Tensor, spec: InputSpec) -> bool:
    """Whether strides agree where they matter (dims of size 1 have none)."""
    return all(a == b for a, b, size in zip(tensor.stride(), spec.stride, spec.shape, strict=True) if size > 1)
