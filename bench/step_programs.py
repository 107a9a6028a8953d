"""Programs of one decode step of Kimi K3.1 at width: on one stream, on streams that pay, on forced ones, in two halves.

    PYTHONPATH=. python bench/step_programs.py --layers 4 --batch 1 8 64 --context 32768 --programs DIR

``idle.py``, ``streams.py`` and ``replays.py`` time these programs. With ``--programs DIR`` they take what is there, so
that what was compiled once is timed without a compiler; compile into an empty directory after a change.
"""

import argparse
import json
import shutil
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from k31_decode import example, random_model
from torch.utils import _pytree as pytree

from kimigraph.capture import capture_module
from kimigraph.capture.halves import half_of_call
from kimigraph.capture.named_caches import named_cache_hints
from kimigraph.codegen import build_artifact
from kimigraph.halving import Halving
from kimigraph.ir.config import CompileConfig
from kimigraph.ir.device import device_for
from kimigraph.ir.lifetimes import Lifetimes
from kimigraph.ir.memory_plan import aligned, arena_bytes
from kimigraph.ir.program import CapturedProgram
from kimigraph.ir.schedule import stream_of, waits_of
from kimigraph.ir.trace import Track, read_timeline, write_timeline
from kimigraph.passes import default_pipeline, run_pipeline
from kimigraph.passes.manager import PassRecord
from kimigraph.passes.scheduling.planned import planned_track
from kimigraph.runtime.executor import Executor
from kimigraph.runtime.prepared import PreparedWeights
from kimigraph.session import pass_context

FORMS: dict[str, dict[str, Any]] = {
    "one": {"streams": 1},
    "paying": {},
    "forced": {"force_streams": True},
    "halves": {"half_batches": "on"},
}
USUAL = ("one", "paying", "forced")
FACTS, SCHEDULE = "facts.json", "planned.json"


@dataclass(frozen=True)
class StepProgram:
    """A form of the step: bound to its weights, where it lies, what is known of it, and its planned schedule."""

    executor: Executor
    directory: Path
    facts: dict[str, Any]
    planned: Track


class StepPrograms:
    """The step of one shape with random weights; ``given`` is what a call takes: ids, lengths, caches and states."""

    def __init__(self, shape: CompileConfig, layers: int, kept: Path) -> None:
        self.config, self._kept = replace(shape, target="cuda"), kept
        self._model = random_model(layers, torch.bfloat16)
        self._args = example(self._model, shape.batch, shape.context or 0)
        self.given = [leaf for leaf in pytree.tree_leaves(self._args) if isinstance(leaf, torch.Tensor)]
        self._name = f"k31_{layers}_layers_b{shape.batch}_c{shape.context}_O{shape.opt_level}"
        self._weights = {**dict(self._model.named_parameters()), **dict(self._model.named_buffers())}
        self._prepared = PreparedWeights()
        self._hints = named_cache_hints(self._model, self._args, {})

    @cached_property
    def _captured(self) -> CapturedProgram:
        return capture_module(self._model, self._args, {}, self.config, self._hints)

    def program(self, form: str) -> StepProgram:
        """One of ``FORMS``, compiled unless it was kept."""
        directory = self._kept / self._name / form
        if not (directory / FACTS).exists():
            shutil.rmtree(directory, ignore_errors=True)  # what an interrupted call left
            directory.mkdir(parents=True)
            self._compile(form, directory)
        executor = Executor(directory / "program", self._weights, self._prepared)
        facts = json.loads((directory / FACTS).read_text(encoding="utf-8")) | {"target": executor.manifest.target}
        return StepProgram(executor, directory / "program", facts, read_timeline(directory / SCHEDULE)[0])

    def _compile(self, form: str, directory: Path) -> None:
        config = replace(self.config, **FORMS[form])
        pipeline = default_pipeline(config)

        def run(program: CapturedProgram, watched: bool) -> list[PassRecord]:
            return run_pipeline(program, pipeline, pass_context(config), [])

        half = partial(half_of_call, self._model, self._args, {}, config, self._hints)
        program, _ = Halving(config, pipeline, half).run(self._captured.copy(), run)
        (directory / "program").mkdir()
        manifest = build_artifact(program, "cuda", directory / "program", self_test=False)
        planned = planned_track(program.graph_module.graph, device_for(config)).without("source")
        write_timeline(directory / SCHEDULE, [planned])
        facts = {"launches": manifest.launches, **schedule_facts(program)}
        (directory / FACTS).write_text(json.dumps(facts) + "\n", encoding="utf-8")


def schedule_facts(program: CapturedProgram) -> dict[str, Any]:
    """Streams, nodes aside, events and the arena of a compiled graph."""
    graph = program.graph_module.graph
    lifetimes = Lifetimes(graph)
    return {
        "streams": 1 + max(stream_of(node) for node in graph.nodes),
        "aside": sum(stream_of(node) > 0 for node in graph.nodes),
        "events": len({name for node in graph.nodes for name in waits_of(node)}),
        "arena_bytes": arena_bytes(graph),
        "lower_bound": lifetimes.lower_bound([aligned(tensor.nbytes) for tensor in lifetimes.tensors]),
    }


@contextmanager
def kept_in(directory: Path | None) -> Generator[Path]:
    """``directory``, or one that goes again."""
    if directory is not None:
        directory.mkdir(parents=True, exist_ok=True)
        yield directory
        return
    with tempfile.TemporaryDirectory() as scratch:
        yield Path(scratch)


def main() -> None:
    """Compile and keep what is asked for; one step of each runs, so that its kernels are known to load."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, nargs="+", default=[1])
    parser.add_argument("--context", type=int, default=32768)
    parser.add_argument("--level", type=int, default=2)
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=USUAL)
    parser.add_argument("--programs", type=Path, required=True)
    options = parser.parse_args()
    for batch in options.batch:
        shape = CompileConfig(batch=batch, context=options.context, opt_level=options.level)
        programs = StepPrograms(shape, options.layers, options.programs)
        for form in options.forms:
            step = programs.program(form)
            with torch.no_grad():
                step.executor(*programs.given)
            torch.cuda.synchronize()
            print(batch, form, step.facts, flush=True)


if __name__ == "__main__":
    main()
