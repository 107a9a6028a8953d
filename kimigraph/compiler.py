"""The road from a source to an artifact: capture, passes, code generation, with the compile cache beside it."""

import gc
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from kimigraph.capture import ModelSource, capture, load_source
from kimigraph.capture.halves import capture_half
from kimigraph.capture.stretches import STRETCH, stretch_of
from kimigraph.codegen import build_artifact
from kimigraph.halving import Halving
from kimigraph.ir.cache_formats import cache_bill, experts_bill
from kimigraph.ir.config import CompileConfig
from kimigraph.ir.cost import graph_seconds
from kimigraph.ir.errors import KimigraphError, UsageError
from kimigraph.ir.launches import graph_launches
from kimigraph.ir.manifest import Manifest
from kimigraph.ir.memory_plan import arena_bytes
from kimigraph.ir.printer import print_program
from kimigraph.ir.program import CapturedProgram
from kimigraph.ir.remarks import PassResult
from kimigraph.ir.report import CompileReport
from kimigraph.ir.schedule import summarize
from kimigraph.ir.stages import directory_of
from kimigraph.keys import front_components, graph_components
from kimigraph.outputs import check_replaceable, staged_directory
from kimigraph.passes import (
    Instrument,
    Pass,
    Pipeline,
    TimePasses,
    VerifyPasses,
    check_required_fusions,
    fusion_summary,
    run_pipeline,
)
from kimigraph.passes.fusions import require_fused
from kimigraph.passes.instruments.dump import DumpDirectory
from kimigraph.passes.manager import PassRecord
from kimigraph.passes.sharding.plan import require_divisible
from kimigraph.passes.sharding.sequence import holds_tokens, shared_tokens
from kimigraph.passes.share_tokens import ShareTokens
from kimigraph.report import REPORT_NAME
from kimigraph.runtime.cache import ARTIFACT, DUMPS, Entry, Lookup, digest
from kimigraph.session import Notify, Session, new_session, pass_context
from kimigraph.tools.numerics import CheckNumerics
from kimigraph.tools.publish import publish, reporting_failure


@dataclass
class CanonicalLaunches(Instrument):
    """Counts what the canonicalized graph would launch as it stands (``launches.before`` of the report)."""

    count: int = 0

    def before_pipeline(self, program: CapturedProgram, pipeline: Pipeline) -> None:
        self.count = graph_launches(program.graph_module.graph)

    def after_pass(self, index: int, item: Pass, program: CapturedProgram, result: PassResult, seconds: float) -> None:
        if item.name == "canonicalize":
            self.count = graph_launches(program.graph_module.graph)


def compile_source(
    source: str, configs: list[CompileConfig], out: Path | None, notify: Notify, below: bool | None = None
) -> list[CompileReport]:
    """Compile ``source`` once per configuration; each artifact lands in its own directory, whole or not at all.

    A pipeline has an artifact for each of its stages, in directories of their own below that. ``out`` is the directory
    of one artifact, or the one that several go below by shape (``below`` says so for one of
    several); None: a directory named after source and shape in the working directory. What was there before stays until
    the new artifact is complete and, with ``verify``, verified: a program that fails verification is neither written
    nor kept in the cache. Raises KimigraphError with one paragraph for people.
    """
    reports: list[CompileReport] = []
    for config in configs:
        stages: list[CompileReport] = []
        for number in range(config.pp):
            with new_session(_of_stage(config, number), notify) as session:
                model = load_source(source, config)
                directory = out or Path(f"{model.name}-{model.shape_key}")
                if out is not None and (len(configs) > 1 if below is None else below):
                    directory = out / model.shape_key
                if config.pp > 1:
                    notify(f"stage {number} of {config.pp}")
                    directory = directory / directory_of(number)
                stages.append(_compile_one(source, model, directory, session))
        if config.pp > 1:
            require_fused(stages, config.required_fusions)
        reports += stages
    return reports


def _of_stage(config: CompileConfig, stage: int) -> CompileConfig:
    """What is asked of one stage: a fusion that is required fires in one of them, not in each."""
    if config.pp == 1:
        return config
    dumps = None if config.dump_passes is None else str(Path(config.dump_passes) / directory_of(stage))
    return replace(config, stage=stage, required_fusions=(), dump_passes=dumps)


def compile_model(
    source: str, model: ModelSource, config: CompileConfig, directory: Path, notify: Notify
) -> CompileReport:
    """Compile ``model``, which ``source`` was resolved to, into ``directory``; as in ``compile_source``."""
    with new_session(config, notify) as session:
        return _compile_one(source, model, directory, session)


def _compile_one(source: str, model: ModelSource, directory: Path, session: Session) -> CompileReport:
    check_replaceable(directory)
    config = session.config
    require_divisible(model.document, config.tp)
    if config.cache_layout == "model":
        for item in model.inputs:
            if item.hint.descriptor and holds_tokens(item.hint.descriptor):
                shared_tokens(item.shape, config.sp, False, item.name)  # refused before any work
    if config.dump_passes:
        DumpDirectory(Path(config.dump_passes))  # refused before any work, not after
    asked = front_components(model.key, config, session.pipeline, session.target, model.shape_key)
    hit = looked_up(session, digest(asked), lambda: session.cache.find_front(asked, session.wants_dumps))
    front = None if hit.entry is not None else asked  # a hit's points to its entry already
    with staged_directory(directory) as staged:
        captured = None
        if hit.entry is not None:
            report, finished = restore(hit, staged, session, model.name), hit.graph_key
        else:
            captured = _captured(model, session)
            half = partial(capture_half, model, config)
            report, finished = build(captured, staged, session, hit.reason, use_up=not config.verify, half=half)
        if config.verify:
            from kimigraph.verify import verify_source

            session.notify(
                f"verifying against {'the eager model' if config.reference == 'eager' else config.reference}"
            )
            with discarding(finished, session), session.timing.stage("verify"):
                report.verify = verify_source(source, model, staged, captured, config, session.target)
        keep(front, finished, report, session)
        report = replace(report, source=model.name, shape_key=model.shape_key, artifact=str(directory))
        if config.report:
            report.report = str(directory / REPORT_NAME)
            publish(report, staged, session.shown, session.asked)
    return report


def _captured(model: ModelSource, session: Session) -> CapturedProgram:
    """The step as it is captured, or that of one stretch of its tokens where ranks take one each."""
    session.notify(f"capturing {model.name}")
    share = next((item for item in session.pipeline if isinstance(item, ShareTokens)), None)
    stretch = None if share is None else stretch_of(model, session.config, share.least_tokens)
    with session.timing.stage("capture"):
        if stretch is None:
            return capture(model, session.config, weights=session.config.verify)
        captured = capture(stretch, session.config, weights=False)
    captured.info[STRETCH] = model.shape.tokens // session.config.sp if model.shape is not None else 0
    return captured


Finished = Entry | str
"""What a compilation leaves for the cache: a new entry, or the graph key of the one that it came from."""


def looked_up(session: Session, key: str, look_up: Callable[[], Lookup]) -> Lookup:
    """The answer of ``look_up``. On a miss this process alone compiles ``key`` until the session ends."""
    found = look_up()
    if found.entry is not None:
        return found
    lock = ExitStack()
    if lock.enter_context(session.cache.compiling(key, session.notify)):
        again = look_up()
        if again.entry is not None:
            lock.close()
            return replace(again, note="another process compiled it meanwhile")
    session.locks.push(lock)
    return found


def build(
    captured: CapturedProgram,
    directory: Path,
    session: Session,
    reason: str = "",
    *,
    use_up: bool = False,
    half: Callable[[CapturedProgram], CapturedProgram] | None = None,
) -> tuple[CompileReport, Finished]:
    """Run the pipeline on a copy of ``captured`` and write the artifact into ``directory``, or reuse an equal one.

    With ``use_up`` there is no copy: nobody needs the capture any more. ``half`` captures the step of half the batch,
    for half-batches. Stores nothing: the caller does (``keep``), once it is content with the result.
    """
    text = print_program(captured)
    graph = graph_components(captured, session.config, session.pipeline, session.target, text)
    key = digest(graph)
    known = looked_up(session, key, lambda: session.cache.find_graph(key, session.wants_dumps))
    if known.entry is not None:
        return restore(known, directory, session, str(captured.info.get("source", ""))), known.graph_key
    program = captured if use_up else captured.copy()
    with uncollected():
        halving = Halving(replace(session.config, target=session.target), session.pipeline, half)
        return _build(program, text, directory, session, graph, _why(reason, known), halving)


def _build(
    program: CapturedProgram,
    captured: str,
    directory: Path,
    session: Session,
    graph: dict[str, Any],
    reason: str,
    halving: Halving,
) -> tuple[CompileReport, Finished]:
    config, target = session.config, session.target
    nodes = len(program.graph_module.graph.nodes)
    clock, launches = TimePasses(), CanonicalLaunches()
    context = pass_context(replace(config, target=target))
    session.notify("running passes")
    with session.timing.stage("passes"):
        # Numbers come before the verifier: what an invalid graph computes says more than the rule that it breaks.
        numerics = CheckNumerics(config.seed)
        checks = [numerics, VerifyPasses()] if config.check_numerics else []
        whole = program

        def run(step: CapturedProgram, watched: bool) -> list[PassRecord]:
            watchers: list[Instrument] = []
            if watched:
                text = captured if step is whole else print_program(step)
                watchers = [*session.dumping(text), clock, launches, *checks]
            return run_pipeline(step, session.pipeline, context, watchers, verify=not checks)

        with reporting_failure(CompileReport(phase=config.phase, target=target), session.asked):
            program, records = halving.run(whole, run)
    check_required_fusions(records, config)
    session.notify(f"generating code for {target}")
    with session.timing.stage("codegen"):
        manifest = build_artifact(
            program, target, directory, seed=config.seed, notify=session.notify, cache_key=digest(graph)
        )
    estimates = graph_seconds(program.graph_module.graph, context.device)
    report = CompileReport(
        phase=config.phase,
        target=target,
        graph={
            "nodes_before": nodes,
            "nodes_after": len(program.graph_module.graph.nodes),
            "estimated_us": sum(estimates.values()) * 1e6,
            "estimated_for": context.device.name,
        },
        fusions=fusion_summary(records),
        kernels=[{**asdict(item), "estimated_us": estimates[item.name] * 1e6} for item in manifest.kernels],
        launches={"before": launches.count, "after": manifest.launches},
        streams=asdict(summarize(program.graph_module.graph, context.device)),
        memory={
            "arena_bytes": arena_bytes(program.graph_module.graph),
            **cache_bill(program.inputs),
            **experts_bill(program.info.get("quantization", ())),
        },
        quantization=list(program.info.get("quantization", ())),
        cache={"status": session.cache.status, "key": digest(graph), "reason": reason, "saved_seconds": 0.0},
        timing={"per_pass": dict(clock.seconds)},
        numerics=numerics.table,
        remarks=[remark.as_dict() for record in records for remark in record.result.remarks],
    )
    title = {"model": manifest.model, "phase": manifest.phase, "shape": manifest.shape_key, "target": target}
    return _for_session(report, session), Entry(graph, directory, session.dumps, report.as_dict(), title)


@contextmanager
def uncollected() -> Generator[None]:
    """Without Python's collector of cycles during the block: it would walk over a large graph again and again."""
    running = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if running:
            gc.enable()


def _why(front_reason: str, known: Lookup) -> str:
    """The reason of a miss: that of the front key, unless only the graph key's says that an entry was corrupt."""
    return known.reason if "corrupt" in known.reason or not front_reason else front_reason


def restore(hit: Lookup, directory: Path, session: Session, source: str) -> CompileReport:
    """Fill ``directory`` from a cache entry; stored dumps are written where dumps were asked for.

    ``source`` is what the model goes by now: an entry is shared by equal models of other names.
    """
    assert hit.entry is not None
    reason, session.shown = hit.note, session.scratch / "dumps"
    with session.timing.stage("restore"):
        hit.entry.restore(ARTIFACT, directory)
        dumped = hit.entry.restore(DUMPS, session.shown)
        manifest = Manifest.read(directory)
        replace(manifest, info={**manifest.info, "source": source}).write(directory)
        report = CompileReport(**hit.entry.report)
        if session.config.dump_passes:
            stored = DumpDirectory(Path(session.config.dump_passes))
            for name in (name for name in dumped if not name.startswith(".")):
                stored.write(name, (session.shown / name).read_text(encoding="utf-8"))
            reason = "; ".join(filter(None, (reason, "the dumps are those of the original compilation")))
            session.notify(f"cache hit: {reason}")
    # What the original compilation took; ``keep`` takes off what this one does.
    took = float(report.timing.get("total", 0.0))
    report.cache = {"status": "hit", "key": hit.graph_key, "reason": reason, "saved_seconds": took}
    return _for_session(report, session)


def _for_session(report: CompileReport, session: Session) -> CompileReport:
    """A copy of a report with this session's times; the seconds of each pass stay when they were asked for."""
    passes = {"per_pass": report.timing["per_pass"]} if session.config.time_passes else {}
    numerics = report.numerics if session.config.check_numerics else []
    return replace(report, timing=passes, numerics=numerics, cache=dict(report.cache), dumps=session.config.dump_passes)


@contextmanager
def discarding(finished: Finished, session: Session) -> Generator[None]:
    """Take a program that fails inside the block out of the cache, if it came from there."""
    try:
        yield
    except KimigraphError:
        if isinstance(finished, str):
            session.cache.discard(finished)
        raise


def keep(front: dict[str, Any] | None, finished: Finished, report: CompileReport, session: Session) -> None:
    """Store what was built and complete ``report``: times, and a warning when the cache could not be written."""
    with session.timing.stage("store"):
        if isinstance(finished, Entry):
            timing = {**session.timing.as_dict(), "per_pass": finished.report["timing"].get("per_pass", {})}
            session.cache.store(front, replace(finished, report={**finished.report, "timing": timing}))
        elif front is not None:
            session.cache.store_front(front, finished)
    if session.cache.mode == "check":
        report.cache["reason"] = f"--cache check: {session.cache.note}"
    if session.cache.warning:
        session.notify(session.cache.warning)
        report.cache["reason"] = "; ".join(filter(None, (report.cache["reason"], session.cache.warning)))
    report.timing = {**session.timing.as_dict(), **report.timing}
    saved = report.cache["saved_seconds"] - report.timing["total"]
    report.cache["saved_seconds"] = round(max(saved, 0.0), 3)


def read_manifest(directory: Path) -> Manifest:
    """The manifest of an artifact directory, or a usage error that says what is wrong with it."""
    if not (directory / "manifest.json").exists():
        raise UsageError(
            f"{directory} is no artifact (no manifest.json): give the directory that `kimigraph compile` wrote"
        )
    return Manifest.read(directory)
