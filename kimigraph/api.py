"""The Python API: ``optimize``, ``Compiled``, ``load``."""

import shutil
import tempfile
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from kimigraph.capture import capture_module
from kimigraph.capture.function_source import module_source
from kimigraph.capture.halves import half_of_call
from kimigraph.capture.identity import call_digest
from kimigraph.capture.named_caches import described_by_operators, named_cache_hints
from kimigraph.capture.signature import normalize_call
from kimigraph.compiler import build, discarding, keep, read_manifest
from kimigraph.ir.config import MAX_GRAPHS, MAX_SHAPES, CompileConfig
from kimigraph.ir.errors import UsageError
from kimigraph.ir.manifest import Manifest
from kimigraph.ir.policy import policy_of
from kimigraph.ir.program import CapturedProgram, InputSpec
from kimigraph.ir.report import CompileReport
from kimigraph.outputs import staged_directory
from kimigraph.passes.quantization.calls import with_inputs
from kimigraph.report import REPORT_NAME
from kimigraph.run import program_weights, seeded_weights
from kimigraph.runtime.calls import CallStructure
from kimigraph.runtime.dispatch import KnownCall, know
from kimigraph.runtime.executor import ALIGNMENT, Executor, InputMismatchError, require_runnable
from kimigraph.runtime.graphs import GraphMode, graph_mode
from kimigraph.runtime.prepared import PreparedWeights
from kimigraph.session import new_session, resolve_target
from kimigraph.tools.publish import publish


@dataclass(frozen=True)
class Program:
    """One compiled shape: its files, the executor over them, the structure of its calls and its report."""

    directory: Path
    executor: Executor
    calls: CallStructure
    report: CompileReport

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            return self.calls.returned(self.executor(*self.calls.tensors(args, kwargs)))
        except InputMismatchError as error:
            changed = _changed_caches(self.executor.manifest)
            if not changed:
                raise
            raise InputMismatchError(f"{str(error).rstrip('.')}. {changed}") from None

    def takes(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether the program was compiled for a call with just such tensors."""
        try:
            return self.executor.takes_as_given(self.calls.tensors(args, kwargs))
        except InputMismatchError:
            return False


def _changed_caches(manifest: Manifest) -> str:
    """What a policy made of the caches, for a call that has others; empty where there is no policy."""
    records = [record for record in manifest.info.get("quantization", ()) if "after" in record]
    first = {role: next((r for r in records if r["role"] == role), None) for role in ("latent", "index_key")}
    if not records:
        return ""
    texts = [f"{r['cache']} is {r['after']}, in the model {r['before']}" for r in first.values() if r is not None]
    policy = manifest.info.get("policy", "")
    return f"Under policy '{policy}' {'; '.join(texts)}: take caches from Compiled.new_caches()"


class Compiled:
    """A compiled model: call it as the model is called; caches are updated in place.

    A call with tensors of other shapes, strides, dtypes or devices, or with other plain values, compiles another
    program (``CompileConfig.max_shapes`` of them stay in memory, the least recently used one goes first; all are in the
    compile cache). A loaded artifact has the one it was compiled for. With ``CompileConfig.cuda_graph`` steps run as
    CUDA graphs (``graphs``).
    """

    def __init__(
        self,
        compile_call: Callable[[tuple[Any, ...], dict[str, Any]], Program],
        max_shapes: int = MAX_SHAPES,
        graphs: GraphMode | None = None,
    ) -> None:
        """``compile_call(args, kwargs)`` makes the program of one call, which ``graphs`` has adopted if it is given."""
        self._compile_call, self._max_shapes = compile_call, max_shapes
        self.graphs = graphs
        """What runs the steps as CUDA graphs; None without ``CompileConfig.cuda_graph``."""
        self._programs: dict[str, Program] = {}
        self._known: list[tuple[KnownCall, str, Program]] = []
        self._latest: Program | None = None

    @classmethod
    def of_program(cls, program: Program, graphs: GraphMode | None = None) -> "Compiled":
        """One program for every call."""
        compiled = cls(lambda args, kwargs: program, graphs=graphs)
        compiled._latest = program
        return compiled

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run one step on ``args`` and ``kwargs``, given and returned in the model's own structure.

        Raises InputMismatchError (a TypeError) when a loaded artifact does not fit them.
        """
        for number, (call, key, program) in enumerate(self._known):
            arguments = call.arguments(args, kwargs)
            if arguments is not None:
                if number:
                    self._known.insert(0, self._known.pop(number))
                    self._note_use(key, program)
                self._latest = program
                return call.run(arguments)
        key, program = self._program_in_formats(args, kwargs)
        result = program(args, kwargs)
        call = know(args, kwargs, program.executor, program.calls)
        if call is not None:
            self._known = [(call, key, program), *self._known][: self._max_shapes]
        return result

    def compile(self, example_inputs: tuple[Any, ...] | dict[str, Any]) -> "Compiled":
        """Compile for the shapes of ``example_inputs`` now (a tuple of arguments, or a dict of keyword arguments)."""
        args, kwargs = ((), example_inputs) if isinstance(example_inputs, dict) else (tuple(example_inputs), {})
        self._program_for(args, kwargs)
        return self

    def capture(self, *args: Any, **kwargs: Any) -> "Compiled":
        """Capture the step on these arguments as a CUDA graph now, not at their second call; none of them changes.

        A program that has not run yet warms up on copies of its caches. Raises UsageError without
        ``CompileConfig.cuda_graph``, GraphCaptureError, naming the node, for a program that no graph can hold.
        """
        if self.graphs is None:
            raise UsageError("capture() needs graph mode: give CompileConfig(cuda_graph=True) or load(cuda_graph=True)")
        _, program = self._program_in_formats(args, kwargs)
        self.graphs.capture(program.executor, program.calls.tensors(args, kwargs))
        return self

    def _program_in_formats(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, Program]:
        """As ``_program_for``; but a call with caches of a policy's formats is none to compile for.

        Where no program takes it, the latest one says what does not fit.
        """
        if self._latest is None or not _changed_caches(self._latest.executor.manifest) or not self._programs:
            return self._program_for(args, kwargs)
        known = list(self._programs.items())
        key, program = next((pair for pair in known if pair[1].takes(args, kwargs)), known[-1])
        self._note_use(key, program)
        self._latest = program
        return key, program

    def _program_for(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, Program]:
        key = call_key(args, kwargs)
        program = self._programs.get(key)
        if program is None:
            program = self._compile_call(args, kwargs)
            while len(self._programs) >= self._max_shapes:
                gone = next(iter(self._programs))
                if self.graphs is not None:
                    self.graphs.forget(self._programs[gone].executor)
                del self._programs[gone]
                self._known = [known for known in self._known if known[1] != gone]
        self._note_use(key, program)
        self._latest = program
        return key, program

    def _note_use(self, key: str, program: Program) -> None:
        self._programs.pop(key, None)
        self._programs[key] = program  # the last one is the most recently used

    @property
    def known_calls(self) -> list[tuple[KnownCall, str, Program]]:
        """The calls that go to their program at once: each with its key and program, the latest first."""
        return self._known

    @property
    def cache_spec(self) -> tuple[InputSpec, ...]:
        """The caches and states that a call updates, with shapes, dtypes, strides and descriptors."""
        return tuple(spec for spec in self._current().executor.caller_inputs if spec.kind == "cache")

    def new_caches(self) -> dict[str, torch.Tensor]:
        """Zeroed caches of ``cache_spec`` by name, on the program's device."""
        device = self._current().executor.device
        return {
            spec.source: torch.empty_strided(
                spec.shape, spec.stride, dtype=getattr(torch, spec.dtype), device=device
            ).zero_()
            for spec in self.cache_spec
        }

    def report(self) -> CompileReport:
        """The report of the program used last: the ``kimigraph compile --json`` document."""
        return self._current().report

    def explain(self, rule: str) -> str:
        """What the pass ``rule`` did and did not do, one line a site. UsageError for a pass that did not run."""
        report = self.report()
        lines = [
            f"{remark['kind']}: {remark['message']}" + (f" (node {remark['node']})" if remark["node"] else "")
            for remark in report.remarks
            if remark["pass_name"] == rule
        ]
        tried = {remark["pass_name"] for remark in report.remarks} | {entry["rule"] for entry in report.fusions}
        if rule not in tried:
            raise UsageError(
                f"{rule} left no remark on this program; those that did: {', '.join(sorted(tried)) or 'none'} "
                "(a loaded artifact has none: explain what optimize() returns)"
            )
        return "\n".join(lines) or f"{rule}: nothing in this program came near"

    def save(self, directory: str | Path) -> Path:
        """Write the artifact of the program used last; it holds no weights. An artifact that is there is replaced."""
        final = Path(directory)
        with staged_directory(final) as staged:
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(self._current().directory, staged, dirs_exist_ok=True, ignore=ignored)
        return final

    def _current(self) -> Program:
        if self._latest is None:
            raise UsageError("nothing is compiled yet: call the model once, or use compile(example_inputs)")
        return self._latest


def call_key(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """What a program depends on in a call: its structure, its plain values, and what its tensors look like."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    return "\n".join([str(spec), *map(_leaf_key, leaves)])


def _leaf_key(leaf: Any) -> str:
    if isinstance(leaf, torch.Tensor):
        # Kernels are compiled for tensors at multiples of 16 bytes.
        aligned = leaf.device.type != "cuda" or leaf.data_ptr() % ALIGNMENT == 0
        return f"{leaf.dtype} {tuple(leaf.shape)} {leaf.stride()} {leaf.device}{'' if aligned else ' unaligned'}"
    return f"{type(leaf).__name__} {leaf!r}"


class _Compiler:
    """Makes the programs of one model; they share the weights that they bind."""

    def __init__(self, model: torch.nn.Module, config: CompileConfig) -> None:
        if config.overrides or config.dtype:
            option = "overrides" if config.overrides else "dtype"
            raise UsageError(
                f"CompileConfig.{option} does not apply to a model that is built already: change the model"
            )
        self._model, self._config = model, config
        self.graphs = graph_mode(resolve_target(config.target), config.max_graphs) if config.cuda_graph else None
        self._moved: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._prepared = PreparedWeights()

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Program:
        args, kwargs = normalize_call(self._model, args, kwargs)
        name, shape_key = type(self._model).__name__, f"{self._config.phase}-{call_digest(args, kwargs)}"
        directory = Path(tempfile.mkdtemp(prefix="kimigraph-"))
        try:
            with new_session(self._config, lambda _: None) as session:
                with session.timing.stage("capture"):
                    asked = policy_of(self._config.policy).quantises
                    hints = named_cache_hints(self._model, args, kwargs) if asked else None
                    captured = capture_module(self._model, args, kwargs, self._config, hints)
                    described_by_operators(captured)
                    captured.info["shape_key"] = shape_key

                def half(whole: CapturedProgram) -> CapturedProgram:
                    found = half_of_call(self._model, args, kwargs, self._config, hints, whole)
                    described_by_operators(found)
                    return found

                report, finished = build(captured, directory, session, half=half)
                if self._config.verify:
                    from kimigraph.verify import verify_module

                    source = module_source(name, self._model, args, kwargs, self._config)
                    with discarding(finished, session), session.timing.stage("verify"):
                        report.verify = verify_module(source, directory, captured, self._config, session.target)
                keep(None, finished, report, session)
                report.source, report.shape_key, report.artifact = name, shape_key, str(directory)
                if self._config.report:
                    report.report = str(directory / REPORT_NAME)
                    publish(report, directory, session.shown, session.asked)
            called = with_inputs(captured, Manifest.read(directory).inputs)
            calls = CallStructure.of_info(called.in_spec, called.out_spec, called.info)
            program = Program(directory, self._executor(directory, captured), calls, report)
        except BaseException:
            shutil.rmtree(directory, ignore_errors=True)
            raise
        weakref.finalize(program, shutil.rmtree, directory, ignore_errors=True)
        return program

    def _executor(self, directory: Path, captured: CapturedProgram) -> Executor:
        device = Manifest.read(directory).target.partition(":")[0]
        named = {spec.source: captured.tensors[spec.name] for spec in captured.inputs if spec.name in captured.tensors}
        tensors = {name: self._on_device(tensor, device) for name, tensor in named.items()}
        executor = Executor(directory, tensors, self._prepared)
        if self.graphs is not None:
            self.graphs.adopt(executor)
        return executor

    def _on_device(self, tensor: torch.Tensor, device: str) -> torch.Tensor:
        """The tensor on the program's device; moved once, so that programs of other shapes see the same state."""
        if tensor.device.type == device:
            return tensor
        known = self._moved.get(tensor.data_ptr())
        if known is None or known[0].shape != tensor.shape or known[0].dtype != tensor.dtype:
            known = self._moved[tensor.data_ptr()] = (tensor, tensor.to(device))
        return known[1]


def optimize(
    model: torch.nn.Module,
    example_inputs: tuple[Any, ...] | dict[str, Any],
    config: CompileConfig | None = None,
) -> Compiled:
    """Compile ``model`` for the shapes of ``example_inputs`` (a tuple of arguments or a dict of keyword arguments).

    Tensors that the model updates in place are its caches and stay so, buffers too; the example inputs keep their
    values. The program reads the parameters and buffers that the model has now: change them in place (``copy_``,
    ``load_state_dict`` without ``assign``), for one that is replaced by another tensor is not seen, and torch counts no
    write through ``.data``: a weight that was merged with others keeps its old values then. The shape fields of
    ``config`` (batch, tokens, context) say nothing here, the inputs do. Raises ``CaptureError`` when the model cannot
    be captured, ``CompileError`` when a pass or the code generator cannot go on, and ``UsageError`` for a target that
    this process cannot run.
    """
    config = config or CompileConfig()
    if config.pp > 1:
        raise UsageError(
            f"pp {config.pp}: stages share out the layers of a model in a directory, and a call of one stage is none "
            "of the model; use kimigraph.Generator or `kimigraph compile --pp`"
        )
    compiler = _Compiler(model, config)
    return Compiled(compiler, config.max_shapes, compiler.graphs).compile(example_inputs)


def load(
    directory: str | Path,
    weights: Mapping[str, torch.Tensor] | str | Path | None = None,
    *,
    cuda_graph: bool = False,
    max_graphs: int = MAX_GRAPHS,
) -> Compiled:
    """Load a saved artifact and bind ``weights`` to it: a state dict, the directory of a checkpoint, or a file.

    A file is the ``.onnx`` or ``.pt2`` that the artifact was compiled from.

    A checkpoint's tensors are read one by one onto the program's device; docs/checkpoints.md has what is read.

    Without weights, an artifact of a randomly initialised model gets its own seeded ones; for any other that is a
    UsageError. A program that binds no weights needs none. ``cuda_graph`` and ``max_graphs`` are as in
    ``CompileConfig``. Raises CorruptArtifactError when a file was changed.
    """
    path = Path(directory)
    manifest = read_manifest(path)
    require_runnable(manifest.target)
    graphs = graph_mode(manifest.target, max_graphs) if cuda_graph else None
    give_up = weights is None
    if weights is None:
        if not manifest.random_weights and any(spec.kind in ("weight", "buffer") for spec in manifest.inputs):
            raise UsageError(
                f"{path} holds no weights: pass weights=model.state_dict(), or a checkpoint's directory, to load()"
            )
        weights = seeded_weights(manifest) if manifest.random_weights else {}
    elif isinstance(weights, str | Path):
        weights, give_up = program_weights(manifest, Path(weights)), True
    executor = Executor(path, weights, give_up=give_up)
    if graphs is not None:
        graphs.adopt(executor)
    report = CompileReport(
        source=str(manifest.info.get("source", "")),
        phase=manifest.phase,
        target=manifest.target,
        shape_key=manifest.shape_key,
        kernels=[kernel.as_dict() for kernel in manifest.kernels],
        launches={"before": 0, "after": manifest.launches},
        cache={"status": "off", "key": manifest.cache_key, "reason": "loaded from an artifact"},
        artifact=str(path),
    )
    return Compiled.of_program(Program(path, executor, CallStructure.of_manifest(manifest), report), graphs)
