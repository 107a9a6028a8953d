"""A program against the one it came from, on seeded data: ``--check-numerics``, and the test that bisecting repeats."""

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import Interpreter, Node
from torch.utils import _pytree as pytree

from kimigraph.ir.accuracy import LOW_PRECISION_FLOOR, TOLERANCE_FP32, Deviation, deviation
from kimigraph.ir.cache_formats import given_to, unpack
from kimigraph.ir.data_sets import STEPS, DataSet, data_sets, make_data, run_steps
from kimigraph.ir.errors import NumericsError
from kimigraph.ir.operators import OPERATORS
from kimigraph.ir.program import CapturedProgram, InputSpec
from kimigraph.ir.reference.mxfp4_quantize import mxfp4_rounded
from kimigraph.ir.remarks import PassResult
from kimigraph.ir.reproduce import apart
from kimigraph.passes import Instrument, Pass, Pipeline
from kimigraph.selections import RoundingInterpreter, Selections, check_selections

ROUNDING_FACTOR = 3.0
"""How much worse than the captured program's own rounding error a 16-bit program may be: of a few hundred numbers the
largest error of another order of rounding is easily twice as large, and a wrong rewrite is worse than that."""
_LOW = (torch.bfloat16, torch.float16)
_PACKED = OPERATORS["mxfp4_quantize"].overload


@dataclass(frozen=True)
class Comparison:
    """How far a program is from its reference. ``fault`` says in words why it does not pass, empty when it does."""

    worst: Deviation
    data: DataSet | None
    fault: str = ""

    @property
    def passed(self) -> bool:
        """Whether everything is within tolerance."""
        return not self.fault


class PassNumericsError(NumericsError):
    """A pass changed the result; ``table`` has a row for each pass up to it."""

    def __init__(self, message: str, table: list[dict[str, Any]]) -> None:
        super().__init__(message)
        self.table = table


class Reference:
    """A copy of a program and its results on every data set, to hold others against. Weights are seeded ones, too."""

    def __init__(self, program: CapturedProgram, sets: Sequence[DataSet]) -> None:
        self._program = program.copy()
        constants = {s.source: program.tensors[s.name] for s in program.inputs if s.kind == "constant"}
        self._cases = [_Case(self._program, data, make_data(data, program.inputs, constants)) for data in sets]

    @property
    def tolerances(self) -> dict[str, float]:
        """Tolerance by tensor and step, for those that have one of their own (in 16 bits)."""
        return {name: limit for case in self._cases for name, limit in case.tolerances.items()}

    def compare(self, program: CapturedProgram) -> Comparison:
        """Run ``program`` on all data sets; the comparison of the one that is furthest out of tolerance."""
        found = [case.compare(program) for case in self._cases]
        return max(found, key=lambda item: (bool(item.fault), item.worst.excess))

    def shows(self, program: CapturedProgram) -> bool:
        """Whether the file that ``write_reproducer`` makes of both tells them apart.

        It knows values alone: neither picks that change none of them (entries of a mask that is True everywhere) nor
        the near-ties that ``compare`` forgives.
        """
        return any(not case.apart(program).passed for case in self._cases)


class _Recorder(RoundingInterpreter):
    """Runs a program at any stage and records its picks: of top-k nodes and of the operators that took their place."""

    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        if n.op == "call_function" and "selects" in n.meta:
            picks = result if isinstance(result, torch.Tensor) else result[1]  # a router's weights come first
            self.selections.picked[str(n.meta["selects"])] = picks
        return result


class _WideRecorder(_Recorder):
    """Runs a 16-bit graph in fp32: inputs as given, casts to 16 bits as casts to fp32."""

    def run_node(self, n: Node) -> Any:
        if n.target is torch.ops.aten._assert_tensor_metadata.default:
            return None
        return super().run_node(n)

    def fetch_args_kwargs_from_env(self, n: Node) -> Any:
        """The arguments of a node, with 16-bit types among them widened."""
        args, kwargs = super().fetch_args_kwargs_from_env(n)
        return pytree.tree_map(_widened, (args, kwargs))


def _widened(value: Any) -> Any:
    return torch.float32 if isinstance(value, torch.dtype) and value in _LOW else value


@dataclass
class _Run:
    values: dict[str, torch.Tensor]
    selections: list[Selections]
    """One for each step."""


@dataclass
class _Case:
    """One data set of a reference."""

    program: CapturedProgram
    data: DataSet
    tensors: list[torch.Tensor]
    run: _Run = field(init=False)
    want: dict[str, torch.Tensor] = field(init=False)
    """What counts as right: the program's values, in 16 bits those of the same graph in fp32."""
    tolerances: dict[str, float] = field(init=False)

    def __post_init__(self) -> None:
        self.low = any(t.dtype in _LOW for t in self.tensors)
        self.tolerance = LOW_PRECISION_FLOOR if self.low else TOLERANCE_FP32
        self.run = self._execute(self.program)
        self.want = self._right(self.run) if self.low else self.run.values
        self.tolerances = self._rounding_errors() if self.low else {}

    def compare(self, program: CapturedProgram) -> Comparison:
        got = self._execute(program)
        want, fault = self.want, ""
        formats, packed = tuple(spec for spec in program.inputs if spec.parts), packed_in(program)
        try:
            # Quantised keys rank otherwise; what they cost is no fault of a rewrite.
            if formats or packed or self._exchanged(got):
                want = self._right(got, formats, packed)
        except NumericsError as error:
            fault = str(error)
        worst = deviation(self._comparable(got.values), want, self.tolerance, self.tolerances)
        if not fault and not worst.passed:
            fault = str(worst)
        return Comparison(worst, self.data, f"{fault} (data set '{self.data.name}')" if fault else "")

    def apart(self, program: CapturedProgram) -> Deviation:
        specs, outputs = self.program.inputs, [spec.source for spec in self.program.outputs]
        constants = {s.source: self.program.tensors[s.name] for s in specs if s.kind == "constant"}
        with torch.no_grad():
            before, form = (Interpreter(graph.graph_module).run for graph in (self.program, program))
            return apart(before, form, specs, outputs, constants, self.data, self.tolerances)

    def _right(
        self, picked: _Run, formats: Sequence[InputSpec] = (), packed: AbstractSet[str] = frozenset()
    ) -> dict[str, torch.Tensor]:
        """The right values with the picks of another run, so that near-ties do not count, in caches of ``formats`` and
        with what MXFP4 leaves of the weights ``packed``."""
        picks = [selections.picked for selections in picked.selections]
        return self._execute(self.program, picks, self.low, formats, picked.values, packed).values

    def _comparable(self, values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: value.float() if value.dtype in _LOW else value for name, value in values.items()}

    def _exchanged(self, got: _Run) -> bool:
        """Whether picks differ, all of them near-ties; NumericsError for one that is none."""
        differing = 0
        for want, found in zip(self.run.selections, got.selections, strict=True):
            # A program that starts out with operators instead of top-k nodes has no scores to judge their picks by.
            judged = {name: picks for name, picks in found.picked.items() if name in want.scores}
            differing += check_selections(want, judged, self.tolerance)
        return differing > 0

    def _execute(
        self,
        program: CapturedProgram,
        picks: Sequence[dict[str, torch.Tensor]] = (),
        wide: bool = False,
        formats: Sequence[InputSpec] = (),
        settled: Mapping[str, torch.Tensor] | None = None,
        packed: AbstractSet[str] = frozenset(),
    ) -> _Run:
        selections: list[Selections] = []

        def step(*tensors: torch.Tensor) -> Any:
            inject = picks[len(selections)] if picks else None
            ending = f" at step {len(selections) + 1}"
            theirs = {name.removesuffix(ending): v for name, v in (settled or {}).items() if name.endswith(ending)}
            kind = _WideRecorder if wide else _Recorder
            interpreter = kind(program, tensors, formats, inject, theirs, self.tolerance)
            with torch.no_grad():
                results = interpreter.run(*tensors)
            selections.append(interpreter.selections)
            return results

        named = {spec.source: t for spec, t in zip(self.program.inputs, self.tensors, strict=True)}
        named |= {name: mxfp4_rounded(named[name]) for name in packed}
        inputs, tensors = program.inputs, given_to(program.inputs, named)
        if wide:
            inputs = tuple(replace(s, dtype="float32") if getattr(torch, s.dtype) in _LOW else s for s in inputs)
            tensors = [t.float() if t.dtype in _LOW else t for t in tensors]
        values = run_steps(step, self.data, inputs, tensors, [spec.source for spec in program.outputs], STEPS)
        return _Run(self._unpacked(values, program.inputs), selections)

    def _unpacked(self, values: dict[str, torch.Tensor], inputs: Sequence[InputSpec]) -> dict[str, torch.Tensor]:
        """Values by name and step, those of quantised caches as the captured caches that they hold."""
        captured = {spec.source: spec for spec in self.program.inputs}
        for spec in (spec for spec in inputs if spec.parts):
            for name in [name for name in values if name.startswith(f"{spec.source} at step ")]:
                step = name.removeprefix(spec.source)
                for source, part in unpack(spec, values.pop(name)).items():
                    wanted = captured[source]
                    values[source + step] = part.reshape(wanted.shape).to(getattr(torch, wanted.dtype))
        return values

    def _rounding_errors(self) -> dict[str, float]:
        """Tolerance by tensor: a factor more than what the program in 16 bits is away from itself in fp32."""
        own = self._comparable(self.run.values)
        errors = {name: deviation({name: own[name]}, {name: value}).relative for name, value in self.want.items()}
        return {name: max(ROUNDING_FACTOR * error, LOW_PRECISION_FLOOR) for name, error in errors.items()}


def packed_in(program: CapturedProgram) -> set[str]:
    """The weights that a program packs as MXFP4, by their outside names."""
    sources = {spec.name: spec.source for spec in program.inputs}
    packs = (node for node in program.graph_module.graph.nodes if node.target is _PACKED)
    return {sources[node.all_input_nodes[0].name] for node in packs}


@dataclass
class CheckNumerics(Instrument):
    """Compares the program with the captured one after every pass that changed it; ``table`` has a row for each pass.

    Raises PassNumericsError naming the first pass whose program is out of tolerance.
    """

    seed: int = 0
    table: list[dict[str, Any]] = field(default_factory=lambda: [])
    _reference: Reference | None = field(default=None, init=False, repr=False)
    _last: Comparison = field(default=Comparison(Deviation(), None), init=False, repr=False)

    def before_pipeline(self, program: CapturedProgram, pipeline: Pipeline) -> None:
        """Run the captured program."""
        self._reference = Reference(program, data_sets(self.seed))
        self._last = self._reference.compare(program)
        self._add(0, "capture", False)

    def after_pass(self, index: int, item: Pass, program: CapturedProgram, result: PassResult, seconds: float) -> None:
        """Compare, if the pass changed anything."""
        assert self._reference is not None
        if result.modified:
            self._last = self._reference.compare(program)
        self._add(index, item.name, result.modified)
        if not self._last.passed:
            raise PassNumericsError(
                f"pass {index} '{item.name}' changed the result: {self._last.fault}. `kimigraph bisect` finds the "
                f"rewrite, --disable-pass {item.name} compiles without it.",
                self.table,
            )

    def _add(self, index: int, name: str, modified: bool) -> None:
        worst, data = self._last.worst, self._last.data
        self.table.append(
            {
                "index": index,
                "pass": name,
                "modified": modified,
                "max_abs_err": worst.absolute,
                "max_rel_err": worst.relative,
                "tolerance": worst.tolerance,
                "tensor": worst.tensor,
                "data": data.name if data else "",
                "passed": self._last.passed,
            }
        )
