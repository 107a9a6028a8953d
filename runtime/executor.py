"""Runs an artifact: its program bound to weights on one device."""

import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from safetensors.torch import load_file

from kimigraph.adapters.onnx_model import require_onnx
from kimigraph.adapters.tensor_version import tensor_versions
from kimigraph.ir import env
from kimigraph.ir.config import ONNXRUNTIME
from kimigraph.ir.errors import CompileError, UsageError
from kimigraph.ir.manifest import verify_artifact
from kimigraph.ir.preparation import names_read
from kimigraph.ir.program import InputSpec
from kimigraph.runtime.onnx_step import OnnxStep
from kimigraph.runtime.parallel import require_joined
from kimigraph.runtime.prepared import PreparedWeight, PreparedWeights, in_turn, prepare_in_place

Step = Callable[..., tuple[torch.Tensor, ...]]
Stepper = Callable[[list[torch.Tensor]], tuple[torch.Tensor, ...]]
ALIGNMENT = 16
_NO_GUARD: AbstractContextManager[None] = nullcontext()


class InputMismatchError(UsageError, TypeError):
    """A tensor is not what the program was compiled for: another shape, dtype, device or layout."""


def require_runnable(target: str) -> None:
    """UsageError, with the remedy, unless this process can run programs of ``target``."""
    if target == ONNXRUNTIME:
        require_onnx()
    if target == "cpu" and not env.enable_interpreter():
        raise UsageError(
            "target 'cpu' runs Triton kernels under the interpreter, and triton was imported without it: "
            "set TRITON_INTERPRET=1 before the first import of triton, or use target 'cpu:reference'"
        )
    if target.startswith("cuda"):
        if not torch.cuda.is_available():
            raise UsageError(
                f"target {target!r} runs on a CUDA device and torch finds none here: run it where there is one, "
                "or compile with target 'cpu' or 'cpu:reference' ('cuda:sm_90' can be compiled anywhere, not run)"
            )
        if env.interpreting():
            raise UsageError(
                f"target {target!r} runs compiled kernels, and this process interprets them: unset TRITON_INTERPRET, "
                "or use a process of its own for target 'cpu'"
            )


def device_of(target: str) -> torch.device:
    """The device that a target's programs run on: for cuda the current one."""
    return torch.device("cuda", torch.cuda.current_device()) if target.startswith("cuda") else torch.device("cpu")


def load_program(directory: Path) -> ModuleType:
    """``program.py`` of an artifact as a module of its own, so that many can live in one process.

    It is compiled from its text: no byte code is written into the artifact, and none can be stale.
    """
    path = directory / "program.py"
    module = ModuleType(f"kimigraph_program_{uuid.uuid4().hex}")
    module.__file__ = str(path)
    exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), vars(module))
    return module


def laid_out(values: torch.Tensor, spec: InputSpec) -> torch.Tensor:
    """A copy of ``values`` in the strides of ``spec``."""
    copy = torch.empty_strided(spec.shape, spec.stride, dtype=values.dtype, device=values.device)
    return copy.copy_(values)


class Executor:
    """A program bound to its weights.

    ``tensors`` maps the outside names of bound inputs (state-dict names, or those of prepared weights, which then are
    taken as they are) to tensors; those on the artifact's device and
    in its layout are bound as they are, so that later changes of a weight are seen. A call takes the caller's tensors
    (caches and inputs) in manifest order and returns the step's outputs; mutated ones change in place.

    Programs over one model that are given the same ``prepared`` share what is made of its weights. ``give_up`` says
    that the tensors were made for this program: ``tensors``, a dict, is emptied, and one that is read to prepare
    others, and for nothing else, leaves memory as soon as they are made.

    Raises CorruptArtifactError when a file is not what the manifest says, UsageError when this process cannot run the
    target, has not joined its ranks or a weight is missing, InputMismatchError (a TypeError) when a tensor is not what
    the program is made for.
    """

    def __init__(
        self,
        directory: Path,
        tensors: Mapping[str, torch.Tensor],
        prepared: PreparedWeights | None = None,
        give_up: bool = False,
    ) -> None:
        self.manifest = verify_artifact(directory)
        require_runnable(self.manifest.target)
        require_joined(self.manifest.ways)
        self.device = device_of(self.manifest.target)
        self._on_gpu = self.device.type == "cuda"
        onnx = self.manifest.kind == "onnx"
        self.step: Step = OnnxStep(directory, self.manifest) if onnx else load_program(directory).step
        self.stepper: Stepper | None = None
        """What takes the steps instead of ``step`` itself: graph mode (``runtime.graphs``)."""
        self._caller = tuple(spec for spec in self.manifest.inputs if not spec.bound)
        self.bound = self._bind(directory, tensors)
        """The bound tensors by outside name; the program updates those that the model keeps as state."""
        if give_up and isinstance(tensors, dict):
            tensors.clear()
        self._prepared = [] if give_up else self._prepare(prepared or PreparedWeights())
        if give_up:
            prepare_in_place(self._unprepared(), self.bound, {spec.source for spec in self.manifest.sources})
        self._watched = [tensor for weight in self._prepared for tensor in weight.sources]
        self._versions = tensor_versions(self._watched)

    def _bind(self, directory: Path, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        constants = directory / "constants.bin"
        stored = load_file(constants) if constants.exists() else {}
        bound: dict[str, torch.Tensor] = {}
        missing: list[str] = []
        for spec in self._to_bind(tensors):
            tensor = stored.get(spec.name) if spec.kind == "constant" else tensors.get(spec.source)
            if tensor is None:
                missing.append(spec.source)
            else:
                bound[spec.source] = self._fit(spec, tensor.detach().to(self.device))
        if missing:
            names = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
            raise UsageError(
                f"the program needs weights that were not given: {names}. Give all of model.state_dict(), by its names"
            )
        return bound

    def _to_bind(self, tensors: Mapping[str, torch.Tensor]) -> list[InputSpec]:
        """What is taken from ``tensors``: of prepared weights those that come as they are to be."""
        made = [spec for spec in self.manifest.inputs if spec.source in self.manifest.preparation]
        return [*self.manifest.wanted(tensors.keys()), *(spec for spec in made if spec.source in tensors)]

    def _prepare(self, known: PreparedWeights) -> list[PreparedWeight]:
        """Make the prepared weights; of the model's own, those that the step does not take leave ``bound``."""
        made: list[PreparedWeight] = []
        specs = {spec.source: spec for spec in self.manifest.bound}
        for name, steps, spent in in_turn(self.manifest.preparation, {spec.source for spec in self.manifest.sources}):
            weight = known.weight(steps, self.bound)
            made.append(weight)
            self.bound[name] = weight.value
            for source in spent:
                del self.bound[source]
            for source in {*names_read(steps)} & {*self.bound}:
                self.bound[source] = self._fit(specs[source], known.current(source, self.bound[source]))
        return made

    def _unprepared(self) -> dict[str, list[Any]]:
        """The steps of the weights that are still to be made."""
        return {name: steps for name, steps in self.manifest.preparation.items() if name not in self.bound}

    @property
    def caller_inputs(self) -> tuple[InputSpec, ...]:
        """The inputs that a call takes, in order."""
        return self._caller

    def argument_template(self) -> tuple[list[Any], tuple[int, ...]]:
        """The arguments of the step with the bound tensors in place, and the places of the caller's, in order."""
        template = [self.bound[spec.source] if spec.bound else None for spec in self.manifest.inputs]
        return template, tuple(place for place, spec in enumerate(self.manifest.inputs) if not spec.bound)

    def takes_as_given(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether a call runs on these very tensors, none of them copied into another layout first."""
        if len(tensors) != len(self._caller):
            return False
        return all(self._fit(spec, tensor) is tensor for spec, tensor in zip(self._caller, tensors, strict=True))

    def _fit(self, spec: InputSpec, tensor: Any) -> torch.Tensor:
        """The tensor as the program expects it; anything that would change its meaning is an error."""
        if not isinstance(tensor, torch.Tensor):
            raise InputMismatchError(f"{spec.source} is a {type(tensor).__name__}, the program takes a tensor")
        if tuple(tensor.shape) != spec.shape or str(tensor.dtype) != f"torch.{spec.dtype}":
            raise InputMismatchError(
                f"{spec.source} is {tensor.dtype} {tuple(tensor.shape)}, the program was compiled for "
                f"torch.{spec.dtype} {spec.shape}: compile for this shape, or pass the tensor it expects"
            )
        if tensor.device != self.device:
            raise InputMismatchError(
                f"{spec.source} is on {tensor.device}, the program runs on {self.device}: move it there"
            )
        if _same_layout(tensor, spec):
            return tensor if self._lies_well(tensor) else self._realigned(tensor, spec)
        if spec.mutated and not spec.bound:
            raise InputMismatchError(
                f"{spec.source} has strides {tensor.stride()}, the program updates it in place with strides "
                f"{spec.stride}: allocate it as `Compiled.new_caches` does"
            )
        if any(step == 0 and size > 1 for step, size in zip(spec.stride, spec.shape, strict=True)):
            raise InputMismatchError(
                f"{spec.source} has strides {tensor.stride()}, the program was compiled for an expanded tensor with "
                f"strides {spec.stride}: compile for a contiguous one, which any layout fits"
            )
        return laid_out(tensor, spec)

    def _lies_well(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor lies where kernels hold every input to lie: on a GPU, at a multiple of 16 bytes."""
        return self.device.type != "cuda" or tensor.data_ptr() % ALIGNMENT == 0

    def _realigned(self, tensor: torch.Tensor, spec: InputSpec) -> torch.Tensor:
        if spec.mutated:
            raise InputMismatchError(
                f"{spec.source} begins at no multiple of {ALIGNMENT} bytes, and the program updates it in place: "
                "allocate it as `Compiled.new_caches` does"
            )
        return laid_out(tensor, spec)

    def __call__(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """One step."""
        return self.run(self.arguments(tensors))

    def arguments(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """All arguments of the step for the caller's ``tensors``, which may be copied into the layout it wants."""
        if len(tensors) != len(self._caller):
            raise InputMismatchError(f"the program takes {len(self._caller)} tensors, {len(tensors)} were given")
        arguments, places = self.argument_template()
        for place, spec, tensor in zip(places, self._caller, tensors, strict=True):
            arguments[place] = self._fit(spec, tensor)
        return arguments

    def take_steps(self, stepper: Stepper) -> None:
        """Let ``stepper`` take the steps from now on. UsageError where another does: they would share its memory."""
        if self.stepper is not None:
            raise UsageError("the program is in a graph mode already: bind the artifact once more for another")
        self.stepper = stepper

    def run(self, arguments: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """One step on all its arguments, which are what ``__call__`` would take."""
        versions = tensor_versions(self._watched)
        if versions != self._versions:
            self._versions = versions
            for weight in self._prepared:
                weight.refresh()
        with self.guard():
            outputs = self.step(*arguments) if self.stepper is None else self.stepper(arguments)
        if len(outputs) != len(self.manifest.outputs):
            raise CompileError(
                f"the program returned {len(outputs)} tensors, its manifest lists {len(self.manifest.outputs)}"
            )
        return outputs

    def guard(self) -> AbstractContextManager[Any]:
        """Makes the program's device the current one, where another is."""
        if self._on_gpu and torch.cuda.current_device() != self.device.index:
            return torch.cuda.device(self.device)
        return _NO_GUARD


def _same_layout(tensor: torch.Tensor, spec: InputSpec) -> bool:
    """Whether strides agree where they matter (dims of size 1 have none)."""
    return all(a == b for a, b, size in zip(tensor.stride(), spec.stride, spec.shape, strict=True) if size > 1)
