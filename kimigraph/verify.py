"""``--verify``: the untouched eager model against the captured graph, then the captured graph against the program.

With ``--reference onnxruntime`` its steps stand for the eager model's (``kimigraph.onnx_reference``). The first step
runs the model in a process of its own and compares every output and updated cache at the model's formats. The second
runs the graph with the program's own picks (top-k of indexers and routers), so that a near-tie cannot hide or fake an
error, and compares the picks with those that the graph itself would have made at the same place (not under a policy
that quantises what they are made by). In 16 bits they are compared with those of the same graph in fp32, and an entry
may differ that lies as near to the cut as 16-bit rounding moves the two. Where a policy gave caches other formats, the
graph's caches go through the reference quantiser after every write, and where it packed weights, the graph has what is
left of them: what quantising costs is `kimigraph quant-report`'s business.
Relative error is the largest absolute error over the largest magnitude of the reference tensor. Tolerance: 1e-4 in
fp32; in 16 bits 1.5 times the error of the captured graph in that type against the same graph in fp32.
"""

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kimigraph.capture import ModelSource, capture, load_source
from kimigraph.capture.eager import EagerStep, eager_step, eager_steps
from kimigraph.capture.program import tensors_of
from kimigraph.codegen import build_artifact
from kimigraph.ir.accuracy import LOW_PRECISION_FLOOR, TOLERANCE_FP32, tensor_error
from kimigraph.ir.cache_formats import given_to, left_in
from kimigraph.ir.config import CompileConfig
from kimigraph.ir.errors import NumericsError
from kimigraph.ir.manifest import Manifest
from kimigraph.ir.policy import policy_of
from kimigraph.ir.program import CapturedProgram, InputSpec
from kimigraph.ir.reference.mxfp4_quantize import mxfp4_rounded
from kimigraph.passes import PassContext, default_pipeline, run_pipeline
from kimigraph.runtime.executor import Executor, device_of
from kimigraph.selections import RoundingInterpreter, Selections, check_selections, score_errors, with_selections

CODE = 32 / 448
"""The largest step between two codes of E4M3, over the largest value."""
EAGER_FACTOR = 1.5
"""How much worse than 16-bit eager a program may be."""


@dataclass(frozen=True)
class StepValues:
    """What one step leaves behind: its results and the inputs it updated, by their outside names."""

    values: dict[str, Tensor]

    def error_against(self, reference: "StepValues") -> dict[str, tuple[float, float]]:
        """(absolute, relative) error by name, over the names that both have."""
        shared = self.values.keys() & reference.values.keys()
        return {name: tensor_error(self.values[name], reference.values[name]) for name in sorted(shared)}


def run_graph(
    program: CapturedProgram,
    tensors: list[Tensor],
    inject: dict[str, Tensor] | None = None,
    formats: tuple[InputSpec, ...] = (),
    settled: Mapping[str, Tensor] | None = None,
    limit: float = 0.0,
) -> tuple[StepValues, Selections]:
    """Run a graph on copies of ``tensors`` (placeholder order), with the picks of ``inject`` by top-k node.

    Caches keep no more than the quantised ones among ``formats`` would, near-ties as in ``settled``.
    """
    copies = [t.clone() if _is_changed(spec) else t for spec, t in zip(program.inputs, tensors, strict=True)]
    interpreter = RoundingInterpreter(program, copies, formats, inject, settled, limit)
    with torch.no_grad():
        outputs = interpreter.run(*copies)
    return _named(program, copies, outputs), interpreter.selections


def _is_changed(spec: InputSpec) -> bool:
    """Whether a step may change that input: the caller's tensors, and the buffers that the model updates."""
    return spec.mutated or not spec.bound


def _named(program: CapturedProgram, tensors: list[Tensor], outputs: tuple[Tensor, ...]) -> StepValues:
    values = {spec.source: value for spec, value in zip(program.outputs, outputs, strict=True)}
    values |= {spec.source: t for spec, t in zip(program.inputs, tensors, strict=True) if spec.mutated}
    return StepValues(values)


def run_artifact(
    directory: Path,
    program: CapturedProgram,
    tensors: list[Tensor],
    device: torch.device,
    captured: CapturedProgram | None = None,
) -> StepValues:
    """Run the program in ``directory`` on copies of ``tensors``, those of ``captured`` (default: ``program``)."""
    specs = (captured or program).inputs
    copies = {spec.source: t.to(device, copy=_is_changed(spec)) for spec, t in zip(specs, tensors, strict=True)}
    executor = Executor(directory, {spec.source: copies[spec.source] for spec in specs if spec.bound})
    arguments = given_to(executor.caller_inputs, copies)
    outputs = executor(*arguments)
    values = {spec.source: value for spec, value in zip(program.outputs, outputs, strict=True)}
    after = copies | left_in(executor.caller_inputs, arguments, copies)
    return StepValues(values | {spec.source: after[spec.source] for spec in specs if spec.mutated})


def verify_source(
    source: str,
    model: ModelSource,
    directory: Path,
    captured: CapturedProgram | None,
    config: CompileConfig,
    target: str,
) -> dict[str, Any]:
    """Verify the artifact in ``directory`` against ``source`` in a process of its own, at an empty and a full cache.

    Returns the report's ``verify`` entry. Raises NumericsError, naming the step, the tensor and both figures, when
    something is outside its tolerance.
    """
    captured = captured or capture(model, config)
    lengths = _lengths(model)
    wide = _single_precision(source, model, captured, config)
    steps = _onnx_steps(model, captured, lengths) if _by_onnx(config) else eager_steps(source, config, lengths)
    eager = dict(zip(lengths, steps, strict=True))
    return _verify(model, eager, _Checker(captured, directory, config, target, wide))


def verify_module(
    model: ModelSource, directory: Path, captured: CapturedProgram, config: CompileConfig, target: str
) -> dict[str, Any]:
    """As ``verify_source``, against a module of this process at its example inputs."""
    step = _onnx_steps(model, captured, [None])[0] if _by_onnx(config) else eager_step(model)
    return _verify(model, {None: step}, _Checker(captured, directory, config, target, None))


def _by_onnx(config: CompileConfig) -> bool:
    return config.reference == "onnxruntime"


def _onnx_steps(model: ModelSource, captured: CapturedProgram, lengths: list[int | None]) -> list[EagerStep]:
    from kimigraph.onnx_reference import onnx_steps

    return onnx_steps(model, captured, lengths)


def _verify(model: ModelSource, eager: Mapping[int | None, EagerStep], checker: "_Checker") -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="kimigraph-verify-") as scratch:
        checker.build_picks(Path(scratch))
        for length, step in eager.items():
            checker.check(model, length, step)
    return checker.result()


def _lengths(model: ModelSource) -> list[int | None]:
    if model.shape is None:
        return [None]
    if model.phase == "prefill":
        return [0]
    return list(dict.fromkeys((0, model.shape.context - model.shape.tokens)))


def _single_precision(
    source: str, model: ModelSource, captured: CapturedProgram, config: CompileConfig
) -> CapturedProgram | None:
    """The same graph in fp32 over the same (rounded) weights; None where the model is fp32 or cannot be had in fp32."""
    if not is_low_precision(captured) or model.shape is None:
        return None
    wide_config = replace(config, dtype="float32")
    wide = capture(load_source(source, wide_config), wide_config)
    rounded = {spec.source: captured.tensors[spec.name] for spec in captured.inputs if spec.name in captured.tensors}
    for spec in wide.inputs:
        if spec.bound and spec.source in rounded:
            wide.tensors[spec.name] = rounded[spec.source].to(getattr(torch, spec.dtype))
    return wide


def is_low_precision(program: CapturedProgram) -> bool:
    """Whether any weight is in 16 bits."""
    return any(spec.kind == "weight" and spec.dtype in ("bfloat16", "float16") for spec in program.inputs)


class _Checker:
    """Runs the comparisons for one artifact and keeps the worst figures. ``wide`` is a 16-bit graph in fp32."""

    def __init__(
        self,
        captured: CapturedProgram,
        directory: Path,
        config: CompileConfig,
        target: str,
        wide: CapturedProgram | None,
    ) -> None:
        self._captured, self._directory, self._wide = captured, directory, wide
        self._config, self._device, self._target = config, device_of(target), target
        self._picks: tuple[Path, CapturedProgram, list[str]] | None = None
        self._limit = LOW_PRECISION_FLOOR if is_low_precision(captured) else TOLERANCE_FP32
        self._tolerance = self._limit
        manifest = Manifest.read(directory)
        self._formats = tuple(spec for spec in manifest.inputs if spec.parts)
        self._packed = manifest.packed_weights().keys()
        if wide is not None:
            for spec in wide.inputs:
                if spec.source in self._packed:
                    wide.tensors[spec.name] = mxfp4_rounded(wide.tensors[spec.name])
        self._ranked_alike = not policy_of(config.policy).index_key.quantises
        self._name = "onnxruntime" if _by_onnx(config) else "eager model"
        self._worst = (0.0, 0.0)
        self._differing = 0

    def build_picks(self, scratch: Path) -> None:
        """Build the program again with its picks as further results."""
        optimized = self._captured.copy()
        run_pipeline(optimized, default_pipeline(self._config), PassContext(self._config), [])
        extended, names = with_selections(optimized)
        if names:
            build_artifact(extended, self._target, scratch, seed=self._config.seed, self_test=False)
            self._picks = (scratch, extended, names)

    def check(self, model: ModelSource, length: int | None, eager: EagerStep) -> None:
        """Both comparisons at one length."""
        where = "" if length is None else f" at length {length}"
        _, args, kwargs = model.build(length)
        tensors = tensors_of(self._captured, args, kwargs)
        graph, own = run_graph(self._captured, tensors)
        reference = _eager_values(self._captured, tensors, eager)
        _require(graph.error_against(reference), {}, self._limit, f"captured graph against {self._name}{where}")
        if self._packed:
            tensors = [
                mxfp4_rounded(t) if spec.source in self._packed else t
                for spec, t in zip(self._captured.inputs, tensors, strict=True)
            ]
            graph, own = run_graph(self._captured, tensors)
        picks = self._program_picks(tensors)
        program = run_artifact(self._directory, self._captured, tensors, self._device)
        near = (self._formats, program.values, self._limit)
        injected, seen = run_graph(self._captured, tensors, picks, *near)
        limits, slack = dict[str, float](), dict[str, Tensor]()
        if self._wide is not None:
            widened, narrow = _widened(self._wide, self._captured, tensors), seen
            injected, seen = run_graph(self._wide, widened, picks, *near)
            # Both the entry and the cut may be off by what the captured graph is, and by the factor more.
            slack = {name: 2 * EAGER_FACTOR * error for name, error in score_errors(narrow, seen).items()}
            forced, _ = run_graph(self._wide, widened, own.picked)
            limits = {
                name: max(EAGER_FACTOR * relative, LOW_PRECISION_FLOOR)
                for name, (_, relative) in graph.error_against(forced).items()
            }
            for name in (source for spec in self._formats for source, _ in spec.parts):
                limits[name] += CODE  # a rounding error of 16 bits may tip a value into the next code
        if self._ranked_alike:
            self._differing += check_selections(seen, picks, self._limit, slack)
        errors = program.error_against(injected)
        self._worst = max((self._worst, *errors.values()), key=lambda pair: pair[1])
        self._tolerance = max((self._tolerance, *limits.values()))
        _require(errors, limits, self._limit, f"program against captured graph{where}")

    def _program_picks(self, tensors: list[Tensor]) -> dict[str, Tensor]:
        if self._picks is None:
            return {}
        directory, extended, names = self._picks
        values = run_artifact(directory, extended, tensors, self._device, self._captured).values
        return {name: values[f"picks.{name}"].cpu() for name in names}

    def result(self) -> dict[str, Any]:
        """The report's entry; reaching this point means that everything was inside its tolerance."""
        return {
            "max_abs_err": self._worst[0],
            "max_rel_err": self._worst[1],
            "tolerance": self._tolerance,
            "passed": True,
            "reference": self._config.reference,
            "differing_picks": self._differing,
        }


def _eager_values(captured: CapturedProgram, tensors: list[Tensor], eager: EagerStep) -> StepValues:
    """What the eager step leaves: its results and all that the graph or the model updates; a model may write what was
    there before."""
    given = {spec.source: t for spec, t in zip(captured.inputs, tensors, strict=True) if spec.mutated}
    values = StepValues({**given, **eager.outputs, **eager.inputs})
    lost = values.values.keys() ^ (given.keys() | {spec.source for spec in captured.outputs})
    if lost:
        raise NumericsError(
            f"the eager model and its captured graph return or update different tensors: {sorted(lost)}"
        )
    return values


def _widened(wide: CapturedProgram, narrow: CapturedProgram, tensors: list[Tensor]) -> list[Tensor]:
    """Inputs of the fp32 graph: its own bound tensors, and the caller's tensors in its types."""
    given = {spec.source: t for spec, t in zip(narrow.inputs, tensors, strict=True)}
    return [
        wide.tensors[spec.name] if spec.bound else given[spec.source].to(getattr(torch, spec.dtype))
        for spec in wide.inputs
    ]


def _require(errors: dict[str, tuple[float, float]], limits: dict[str, float], default: float, what: str) -> None:
    for name, (absolute, relative) in errors.items():
        limit = limits.get(name, default)
        if relative > limit:
            raise NumericsError(
                f"{what}: {name} differs by {absolute:.3g} absolute, {relative:.3g} relative; tolerance {limit:.3g}"
            )
