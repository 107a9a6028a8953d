"""The compiled steps of one model, over one set of weights: what a generator runs."""

import copy
import shutil
import tempfile
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kimigraph.capture import ModelSource, load_source
from kimigraph.capture.source import StepPart
from kimigraph.compiler import compile_model
from kimigraph.ir.config import CompileConfig, Phase
from kimigraph.ir.manifest import Manifest
from kimigraph.ir.report import CompileReport
from kimigraph.replay_program import new_replay_log
from kimigraph.run import seeded
from kimigraph.runtime.executor import Executor, device_of
from kimigraph.runtime.generation import BoundStep, Step
from kimigraph.runtime.generation.stage_step import PipelinedStep, pipelined_step
from kimigraph.runtime.graphs import graph_mode
from kimigraph.runtime.parallel import first_then_others, join_ranks
from kimigraph.runtime.parallel.stage_links import GroupLinks
from kimigraph.runtime.parallel.stages import require_agreement, stage_number
from kimigraph.runtime.prepared import PreparedWeights
from kimigraph.runtime.speculation import ReplayLog, StateShape, Verify
from kimigraph.session import resolve_target
from kimigraph.weights import Watch, drawn_weight, layout_of, read_weights

FORMS = 4
"""Of a batch: its step, that which verifies drafts, that of a layer which makes them; and pieces of prompts. There are
as many graphs for each as a compiled model keeps."""


class StepPrograms:
    """The compiled steps of one model: made when first asked for, over one set of weights.

    ``reports`` has one compile report for each (batch, tokens); ``verifying`` are those of steps that verify drafts,
    ``head`` those of the layer that makes some from hidden states, which ``part`` has the steps give.
    """

    part: StepPart = "step"

    def __init__(self, source: str, config: CompileConfig, notify: Callable[[str], None], watch: Watch) -> None:
        self.target = resolve_target(config.target)
        self.rank = join_ranks(config.mesh, self.target)
        stage = stage_number(config.pp)
        self.source, self.config = source, replace(config, report=False, verify=False, stage=stage)
        self._links = GroupLinks() if config.pp > 1 else None
        self.reports: dict[tuple[int, int], CompileReport] = {}
        self.notify, self._watch = notify, watch
        most = FORMS * config.max_graphs
        self.graphs = graph_mode(self.target, most, reuse_outputs=True) if config.cuda_graph else None
        self._weights = dict[str, Tensor]()
        self._prepared = PreparedWeights(self._weights)
        self._executors: dict[tuple[int, int], Executor] = {}
        self._steps: dict[tuple[int, ...], BoundStep] = {}
        self._pipelined: dict[tuple[int, ...], PipelinedStep] = {}
        self._phase: Phase | None = None
        self._scratch = Path(tempfile.mkdtemp(prefix="kimigraph-generate-"))
        weakref.finalize(self, shutil.rmtree, self._scratch, ignore_errors=True)

    @cached_property
    def device(self) -> torch.device:
        """Where steps run. What another machine will run can be compiled without it."""
        return device_of(self.target)

    @property
    def weights(self) -> Mapping[str, Tensor]:
        """The model's own weights by outside name, as far as a program has asked for them."""
        return self._weights

    @cached_property
    def verifying(self) -> "StepPrograms":
        """The steps that verify drafts, over the same weights."""
        return self._beside("verify", _phase="verify")

    @cached_property
    def head(self) -> "StepPrograms":
        """The steps of the layer that guesses further tokens, over the same weights."""
        return self._beside("head", part="draft_head")

    def _beside(self, name: str, **changes: Any) -> "StepPrograms":
        other = copy.copy(self)
        scratch = self._scratch / name
        scratch.mkdir()
        for cached in ("verifying", "head"):
            vars(other).pop(cached, None)
        vars(other).update(reports={}, _executors={}, _steps={}, _scratch=scratch, **changes)
        return other

    def settle(self, **changes: Any) -> None:
        """Change the configuration of these steps and of those beside them."""
        self.config = replace(self.config, **changes)
        for other in self._others():
            other.settle(**changes)

    def _others(self) -> list["StepPrograms"]:
        return [vars(self)[name] for name in ("verifying", "head") if name in vars(self)]

    def all_reports(self) -> list[CompileReport]:
        """Those of all programs so far, in whatever form."""
        return [*self.reports.values(), *(report for other in self._others() for report in other.all_reports())]

    def verify(self, batch: int, tokens: int, caches: Mapping[str, Tensor]) -> Verify:
        """The step of ``batch`` rows by ``tokens`` tokens that writes no recurrent state: logits [B, S, V] of all."""
        return self.verifying.bound(batch, tokens, caches).all_logits

    def replay_log(self, shape: StateShape, rows: int, tokens: int) -> ReplayLog:
        """Recurrent states of ``rows`` sequences, and a log of ``tokens`` tokens each, folded by a compiled program."""
        return new_replay_log(shape, rows, tokens, self.target, self.device, self._scratch, self.graphs)

    def model(self, batch: int, tokens: int) -> ModelSource:
        """The source of the step of ``batch`` rows by ``tokens`` tokens."""
        return load_source(self.source, self.shaped(batch, tokens), rows=True, part=self.part)

    def shaped(self, batch: int, tokens: int) -> CompileConfig:
        """The configuration of that step."""
        phase = self._phase or ("decode" if tokens == 1 else "prefill")
        length = self.config.state_log if phase == "decode" else 1
        return replace(self.config, phase=phase, batch=batch, tokens=tokens, state_log=length)

    def step(self, batch: int, tokens: int, caches: Mapping[str, Tensor]) -> Step:
        """The step over ``caches``, which are those of an earlier call with the same shape or lie elsewhere."""
        if self._links is None:
            return self.bound(batch, tokens, caches)
        place = _place(batch, tokens, caches)
        if place not in self._pipelined:
            parts = self.config.micro_batches if tokens == 1 else 1
            self._pipelined[place] = pipelined_step(self.executor, batch, tokens, caches, self._links, parts)
        return self._pipelined[place]

    def bound(self, batch: int, tokens: int, caches: Mapping[str, Tensor]) -> BoundStep:
        """The same as one program of all layers."""
        place = _place(batch, tokens, caches)
        if place not in self._steps:
            self._steps[place] = BoundStep(self.executor(batch, tokens), caches)
        return self._steps[place]

    def artifact(self, batch: int, tokens: int) -> Path:
        """Where the compiled step of that shape lies, once it has been asked for."""
        return self._scratch / f"b{batch}-t{tokens}"

    def executor(self, batch: int, tokens: int) -> Executor:
        """The program of that step, bound to the weights."""
        key = (batch, tokens)
        if key not in self._executors:
            model, directory = self.model(*key), self.artifact(batch, tokens)
            self.reports[key], manifest = self._compiled(model, self.shaped(*key), directory)
            self.notify("binding weights")
            self._bring(manifest, model)
            self._executors[key] = Executor(directory, self._weights, self._prepared)
            if self.graphs is not None:  # what cannot be captured of pieces is called, as it is without a graph
                self.graphs.adopt(self._executors[key], optional=tokens > 1 and self._phase is None)
        return self._executors[key]

    def _compiled(self, model: ModelSource, config: CompileConfig, directory: Path) -> tuple[CompileReport, Manifest]:
        """The program in ``directory``. Of several ranks the first compiles, and the others take it from the cache."""

        def compiled() -> tuple[CompileReport, Manifest]:
            cached = replace(config, cache="use") if self.rank and config.cache == "refresh" else config
            report = compile_model(self.source, model, cached, directory, self.notify)
            return report, Manifest.read(directory)

        mode = ", in graph mode" if config.cuda_graph else ""  # ranks capture the same steps, or none does
        made = first_then_others(config.mesh.ways, self.rank, compiled, lambda made: made[1].identity() + mode)
        if config.pp > 1:
            require_agreement(made[1])
        return made

    def _bring(self, manifest: Manifest, model: ModelSource) -> None:
        """Put the tensors that the program binds, and no earlier one did, on its device."""
        wanted = manifest.wanted(self._weights.keys())
        lacking = [spec for spec in wanted if spec.kind != "constant" and spec.source not in self._weights]
        weights = [spec for spec in lacking if spec.kind == "weight"]
        if manifest.random_weights:
            asked = model.document.get("random_weights") or {}
            for done, spec in enumerate(weights):
                self._watch(done, len(weights))
                if asked.get("on_device") and self.device.type != "cpu":
                    self._weights[spec.source] = drawn_weight(spec, model.weight_seed or 0, self.device, self.rank)
                else:
                    self._weights[spec.source] = seeded(spec, manifest, self.rank).to(self.device)
        elif weights:
            layout = layout_of(str(manifest.info.get("model_type", "")))
            packed = manifest.packed_weights()
            self._weights |= read_weights(
                Path(self.source), weights, layout, self.device, self._watch, packed, self.rank
            )
        buffers = [spec for spec in lacking if spec.kind != "weight"]
        if buffers:  # integers that a checkpoint holds: the model itself knows how they are stored
            state = model.loaded.module.state_dict()
            for spec in buffers:
                self._weights[spec.source] = state[model.hints.prefix + spec.source].to(self.device)


def _place(batch: int, tokens: int, caches: Mapping[str, Tensor]) -> tuple[int, ...]:
    """What tells one step from another: of paged caches the first is one for all, and the last their own table."""
    tensors = list(caches.values())
    return batch, tokens, tensors[0].data_ptr(), tensors[-1].data_ptr()
