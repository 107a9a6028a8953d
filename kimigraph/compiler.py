"""The road from a source to an artifact: capture, passes, code generation, with the compile cache beside it."""

import json
import shutil
import tempfile
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from kimigraph.capture import ModelSource, capture, load_source
from kimigraph.codegen import build_artifact
from kimigraph.codegen.launches import graph_launches
from kimigraph.ir import env
from kimigraph.ir.config import TARGETS, CompileConfig
from kimigraph.ir.errors import UsageError
from kimigraph.ir.manifest import Manifest
from kimigraph.ir.printer import print_program
from kimigraph.ir.program import CapturedProgram
from kimigraph.ir.remarks import PassResult
from kimigraph.ir.report import CompileReport
from kimigraph.keys import front_components, graph_components
from kimigraph.outputs import check_replaceable, staged_directory
from kimigraph.passes import (
    DumpPasses,
    Instrument,
    Pass,
    PassContext,
    Pipeline,
    TimePasses,
    check_required_fusions,
    default_pipeline,
    fusion_summary,
    run_pipeline,
)
from kimigraph.passes.instruments.dump import DumpDirectory
from kimigraph.runtime.compile_cache import CompileCache, Lookup, digest

Notify = Callable[[str], None]


@dataclass
class Timing:
    """Seconds per stage; a stage that ran twice adds up."""

    seconds: dict[str, float] = field(default_factory=lambda: {})

    @contextmanager
    def stage(self, name: str) -> Generator[None]:
        """Time a block under ``name``."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def as_dict(self) -> dict[str, Any]:
        """The stages and their ``total``."""
        return {**self.seconds, "total": sum(self.seconds.values())}


@dataclass
class CanonicalLaunches(Instrument):
    """Counts what the canonicalized graph would launch as it stands (``launches.before`` of the report)."""

    count: int = 0

    def before_pipeline(self, program: CapturedProgram, pipeline: Pipeline) -> None:
        self.count = graph_launches(program.graph_module.graph)

    def after_pass(self, index: int, item: Pass, program: CapturedProgram, result: PassResult, seconds: float) -> None:
        if item.name == "canonicalize":
            self.count = graph_launches(program.graph_module.graph)


@dataclass
class Session:
    """What one compilation carries along."""

    config: CompileConfig
    target: str
    cache: CompileCache
    notify: Notify
    timing: Timing = field(default_factory=Timing)


def resolve_target(target: str) -> str:
    """The concrete target: ``auto`` is ``cuda`` with a GPU, else ``cpu:reference``; an unrunnable one is an error."""
    if target == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu:reference"
    if target == "cpu" and not env.enable_interpreter():
        raise UsageError(
            "target 'cpu' runs Triton kernels under the interpreter, and triton was imported without it: "
            "set TRITON_INTERPRET=1 before the first import of triton, or use target 'cpu:reference'"
        )
    if target == "cuda" and not torch.cuda.is_available():
        raise UsageError("target 'cuda' needs a CUDA device: use 'cuda:sm_90' to cross-compile, or 'cpu'")
    if target not in TARGETS and not target.startswith("cuda:sm_"):
        raise UsageError(f"unknown target {target!r}: choose one of {', '.join(TARGETS)}")
    return target


def new_session(config: CompileConfig, notify: Notify) -> Session:
    """A session for one compilation of ``config``."""
    return Session(config, resolve_target(config.target), CompileCache(mode=config.cache), notify)


def compile_source(source: str, configs: list[CompileConfig], out: Path | None, notify: Notify) -> list[CompileReport]:
    """Compile ``source`` once per configuration; each artifact lands in its own directory, whole or not at all."""
    reports: list[CompileReport] = []
    for config in configs:
        session = new_session(config, notify)
        model = load_source(source, config)
        directory = out or Path(f"{model.name}-{model.shape_key}")  # the key starts with the phase
        if out is not None and len(configs) > 1:
            directory = out / model.shape_key
        reports.append(_compile_one(source, model, directory, session))
    return reports


def _compile_one(source: str, model: ModelSource, directory: Path, session: Session) -> CompileReport:
    check_replaceable(directory)
    config, target = session.config, session.target
    front = front_components(model.key, config, target, model.shape_key)
    hit = session.cache.find_front(front)
    captured: CapturedProgram | None = None
    with staged_directory(directory) as staged:
        if hit.entry is not None:
            report = restore(hit, staged, session)
        else:
            session.notify(f"capturing {model.name}")
            with session.timing.stage("capture"):
                captured = capture(model, config)
            report = build(captured, staged, session, front, hit.reason)
        if config.verify:
            from kimigraph.verify import verify_source

            session.notify("verifying against the eager model")
            with session.timing.stage("verify"):
                report.verify = verify_source(source, model, staged, captured, config, target)
    return replace(
        report,
        source=model.name,
        shape_key=model.shape_key,
        timing={**session.timing.as_dict(), **{k: v for k, v in report.timing.items() if k == "passes"}},
        artifact=str(directory),
        dumps=config.dump_passes or None,
    )


def build(
    captured: CapturedProgram, directory: Path, session: Session, front: dict[str, Any] | None, reason: str
) -> CompileReport:
    """Run the pipeline on a copy of ``captured`` and write the artifact into ``directory``, or reuse an equal one."""
    config, target = session.config, session.target
    pipeline = default_pipeline(config)
    graph = graph_components(print_program(captured), str(pipeline), config, target)
    known = session.cache.find_graph(digest(graph))
    if known.entry is not None:
        report = restore(known, directory, session)
        session.cache.store(front, graph, directory, None, report.as_dict())
        return report
    with tempfile.TemporaryDirectory(prefix="kimigraph-dumps-") as scratch:
        dumps = Path(config.dump_passes) if config.dump_passes else Path(scratch)
        program = captured.copy()
        clock, launches = TimePasses(), CanonicalLaunches()
        session.notify("running passes")
        with session.timing.stage("passes"):
            records = run_pipeline(program, pipeline, PassContext(config), [DumpPasses(dumps), clock, launches])
        check_required_fusions(records, config)
        session.notify(f"generating code for {target}")
        with session.timing.stage("codegen"):
            manifest = build_artifact(
                program, target, directory, seed=config.seed, notify=session.notify, cache_key=digest(graph)
            )
        report = CompileReport(
            phase=config.phase,
            target=target,
            graph={
                "nodes_before": len(captured.graph_module.graph.nodes),
                "nodes_after": len(program.graph_module.graph.nodes),
            },
            fusions=fusion_summary(records),
            kernels=[asdict(kernel) for kernel in manifest.kernels],
            launches={"before": launches.count, "after": manifest.launches},
            cache={"status": _status(session.cache), "key": digest(graph), "reason": reason or known.reason},
            timing={"passes": dict(clock.seconds)} if config.time_passes else {},
            remarks=[remark.as_dict() for record in records for remark in record.result.remarks],
        )
        session.cache.store(front, graph, directory, dumps, report.as_dict())
        if session.cache.warning:
            session.notify(session.cache.warning)
    return report


def _status(cache: CompileCache) -> str:
    return {"off": "off", "refresh": "bypass"}.get(cache.mode, "miss")


def restore(hit: Lookup, directory: Path, session: Session) -> CompileReport:
    """Fill ``directory`` from a cache entry; stored dumps are written where dumps were asked for."""
    assert hit.entry is not None
    with session.timing.stage("restore"):
        shutil.copytree(hit.entry / "artifact", directory, dirs_exist_ok=True)
        document = json.loads((hit.entry / "report.json").read_text(encoding="utf-8"))
        if session.config.dump_passes:
            stored = DumpDirectory(Path(session.config.dump_passes))
            for path in sorted((hit.entry / "dumps").glob("[!.]*")):
                stored.write(path.name, path.read_text(encoding="utf-8"))
            session.notify("cache hit: the dumps are those of the original compilation")
    report = CompileReport(**document)
    report.cache = {"status": "hit", "key": hit.graph_key, "reason": ""}
    return report


def read_manifest(directory: Path) -> Manifest:
    """The manifest of an artifact directory, or a usage error that says what is wrong with it."""
    if not (directory / "manifest.json").exists():
        raise UsageError(f"{directory} is no artifact (no manifest.json): give the directory that `kimigraph compile` wrote")
    return Manifest.read(directory)
