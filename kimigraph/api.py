"""The Python API: ``optimize``, ``Compiled``, ``load``."""

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from kimigraph.capture import capture_module
from kimigraph.compiler import Session, build, new_session, read_manifest
from kimigraph.ir.config import CompileConfig
from kimigraph.ir.errors import UsageError
from kimigraph.ir.program import InputSpec
from kimigraph.ir.report import CompileReport
from kimigraph.outputs import check_replaceable, staged_directory
from kimigraph.runtime.executor import Executor, device_of

MAX_SHAPES = 16
"""Programs that one ``Compiled`` keeps in memory; the least recently used one goes first."""


@dataclass
class _Program:
    directory: Path
    executor: Executor
    report: CompileReport
    out_tree: pytree.TreeSpec | None


class Compiled:
    """A compiled model: call it as the model is called; caches are updated in place.

    A call with tensors of other shapes, strides or dtypes compiles another program (kept in memory and in the compile
    cache). A loaded artifact has the one shape it was compiled for.
    """

    def __init__(self, model: torch.nn.Module | None, config: CompileConfig) -> None:
        self._model = model
        self._config = config
        self._programs: dict[str, _Program] = {}
        self._scratch = tempfile.TemporaryDirectory(prefix="kimigraph-")
        self._latest: _Program | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run one step on ``args`` and ``kwargs``, given and returned in the model's own structure."""
        leaves, _ = pytree.tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        program = self._program_for(args, kwargs, tensors)
        outputs = program.executor(*tensors)
        return pytree.tree_unflatten(list(outputs), program.out_tree) if program.out_tree else outputs

    def _program_for(self, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[torch.Tensor]) -> _Program:
        if self._model is None:
            assert self._latest is not None
            return self._latest
        key = ";".join(f"{t.dtype}{tuple(t.shape)}{t.stride()}{t.device.type}" for t in tensors)
        program = self._programs.pop(key, None)
        if program is None:
            program = self._compile(args, kwargs)
            while len(self._programs) >= MAX_SHAPES:
                del self._programs[next(iter(self._programs))]
        self._programs[key] = program  # the last one is the most recently used
        self._latest = program
        return program

    def _compile(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Program:
        assert self._model is not None
        session = new_session(self._config, lambda _: None)
        with session.timing.stage("capture"):
            captured = capture_module(self._model, args, kwargs, self._config)
        directory = Path(tempfile.mkdtemp(dir=self._scratch.name))
        report = build(captured, directory, session, None, "")
        report.timing = session.timing.as_dict()
        bound = {spec.source: captured.tensors[spec.name] for spec in captured.inputs if spec.name in captured.tensors}
        return _Program(directory, _executor(directory, bound, session), report, captured.out_spec)

    def compile(self, example_inputs: tuple[Any, ...] | dict[str, Any]) -> "Compiled":
        """Compile for the shapes of ``example_inputs`` now (a tuple of arguments, or a dict of keyword arguments)."""
        args, kwargs = ((), example_inputs) if isinstance(example_inputs, dict) else (tuple(example_inputs), {})
        leaves, _ = pytree.tree_flatten((args, kwargs))
        self._program_for(args, kwargs, [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)])
        return self

    @property
    def cache_spec(self) -> tuple[InputSpec, ...]:
        """The caches and states that a call updates, with shapes, dtypes and strides."""
        return tuple(spec for spec in self._current().executor.caller_inputs if spec.kind == "cache")

    def new_caches(self) -> dict[str, torch.Tensor]:
        """Zeroed caches of ``cache_spec`` by name, on the program's device."""
        device = self._current().executor.device
        return {
            spec.source: torch.empty_strided(spec.shape, spec.stride, dtype=getattr(torch, spec.dtype), device=device).zero_()
            for spec in self.cache_spec
        }

    def report(self) -> CompileReport:
        """The report of the program used last: the ``kimigraph compile --json`` document."""
        return self._current().report

    def explain(self, rule: str) -> str:
        """What the pass ``rule`` did and did not do, one line a site."""
        lines = [
            f"{remark['kind']}: {remark['message']}" + (f" (node {remark['node']})" if remark["node"] else "")
            for remark in self.report().remarks
            if remark["pass_name"] == rule
        ]
        return "\n".join(lines) or f"{rule}: nothing in this program came near"

    def save(self, directory: str | Path) -> Path:
        """Write the artifact of the program used last; it holds no weights."""
        final = Path(directory)
        check_replaceable(final)
        with staged_directory(final) as staged:
            shutil.copytree(self._current().directory, staged, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
        return final

    def _current(self) -> _Program:
        if self._latest is None:
            raise UsageError("nothing is compiled yet: call the model once, or use compile(example_inputs)")
        return self._latest


def _executor(directory: Path, tensors: dict[str, torch.Tensor], session: Session) -> Executor:
    device = device_of(session.target)
    return Executor(directory, {name: tensor.to(device) for name, tensor in tensors.items()})


def optimize(
    model: torch.nn.Module,
    example_inputs: tuple[Any, ...] | dict[str, Any],
    config: CompileConfig | None = None,
) -> Compiled:
    """Compile ``model`` for the shapes of ``example_inputs`` (a tuple of arguments or a dict of keyword arguments).

    Tensors that the model updates in place are its caches and stay so. Raises ``CaptureError`` when the model cannot be
    captured and ``CompileError`` when a pass or the code generator cannot go on.
    """
    return Compiled(model, config or CompileConfig()).compile(example_inputs)


def load(directory: str | Path, weights: dict[str, torch.Tensor] | None = None) -> Compiled:
    """Load a saved artifact and bind ``weights`` (a state dict) to it.

    Without weights, an artifact of a randomly initialised model gets its seeded ones; any other is an error.
    """
    from kimigraph.run import seeded_weights

    path = Path(directory)
    manifest = read_manifest(path)
    if weights is None:
        if not manifest.info.get("random_weights"):
            raise UsageError(f"{path} holds no weights: pass weights=model.state_dict() to load()")
        weights = seeded_weights(manifest)
    compiled = Compiled(None, CompileConfig(target=manifest.target))
    device = device_of(manifest.target)
    executor = Executor(path, {name: tensor.to(device) for name, tensor in weights.items()})
    compiled._latest = _Program(
        path,
        executor,
        CompileReport(target=manifest.target, phase=manifest.phase, artifact=str(path)),
        pytree.treespec_loads(manifest.out_spec) if manifest.out_spec else None,
    )
    return compiled
