"""What one compilation carries along: its options, where dumps go, the cache, the clock; and for which target it is."""

import tempfile
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kimigraph.codegen.architecture import ahead_of_time_arch
from kimigraph.codegen.launch_memory import describe_memory
from kimigraph.ir.config import ONNXRUNTIME, CompileConfig
from kimigraph.ir.device import device_for
from kimigraph.ir.errors import UsageError
from kimigraph.ir.policy import policy_of
from kimigraph.passes import DumpPasses, Instrument, PassContext, Pipeline, default_pipeline
from kimigraph.runtime.cache import MODES, CompileCache
from kimigraph.runtime.executor import require_runnable

Notify = Callable[[str], None]
SHARING = {"tp": "shard", "sp": "prune-index-exchange", "pp": "split-stages"}
"""The pass that makes a program for several ranks of each dim of a mesh."""


@dataclass
class Timing:
    """Seconds per stage; a stage that ran twice adds up. ``total`` counts from the start, stage or not."""

    seconds: dict[str, float] = field(default_factory=lambda: {})
    start: float = field(default_factory=time.perf_counter)

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
        return {**self.seconds, "total": time.perf_counter() - self.start}


@dataclass
class Session:
    """What one compilation carries along. ``scratch`` holds dumps until they are stored, the report shows ``shown``."""

    config: CompileConfig
    target: str
    pipeline: Pipeline
    cache: CompileCache
    notify: Notify
    scratch: Path
    locks: ExitStack
    timing: Timing = field(default_factory=Timing)
    shown: Path | None = None

    @property
    def dumps(self) -> Path:
        """Where the passes dump: where the user asked for, else beside the cache entry to be."""
        return self.asked or self.scratch / "dumps"

    @property
    def asked(self) -> Path | None:
        """The directory of ``--dump-passes``."""
        return Path(self.config.dump_passes) if self.config.dump_passes else None

    @property
    def wants_dumps(self) -> bool:
        """Whether somebody will read the dumps: they were asked for, or the report shows them."""
        return bool(self.config.dump_passes or self.config.report)

    def dumping(self, captured: str) -> list[Instrument]:
        """The instrument that dumps, unless nobody will read it. ``captured`` is the text of the capture."""
        if not self.wants_dumps:
            return []
        self.shown = self.dumps
        return [DumpPasses(self.dumps, device_for(replace(self.config, target=self.target)), captured)]


def resolve_target(target: str) -> str:
    """The concrete target: ``auto`` is ``cuda`` with a GPU, else ``cpu:reference``.

    UsageError for one that is unknown, or that this process cannot run (``cuda:sm_90`` need not run here).
    """
    if target == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu:reference"
    if ahead_of_time_arch(target) is None:
        require_runnable(target)
    return target


@contextmanager
def new_session(config: CompileConfig, notify: Notify) -> Generator[Session]:
    """A session for one compilation of ``config``; UsageError for options that no compilation can have."""
    if config.cache not in MODES:
        raise UsageError(f"--cache {config.cache}: use one of {', '.join(MODES)}")
    target, pipeline = resolve_target(config.target), default_pipeline(config)
    _check_policy(config, pipeline)
    if config.cache_layout == "paged" and target == ONNXRUNTIME:
        raise UsageError(f"target {target!r} has caches as the model has them: leave out cache_layout, or take another")
    _check_phase(config, pipeline)
    if config.reference != "eager" and not config.verify:
        raise UsageError(
            f"--reference {config.reference} is what --verify compares with: add --verify, or leave it out"
        )
    _check_ranks(config, pipeline, target)
    if config.verify and ahead_of_time_arch(target) is not None:
        require_runnable(target)
    cache = CompileCache(mode=_cache_mode(config))
    with tempfile.TemporaryDirectory(prefix="kimigraph-") as scratch, ExitStack() as locks:
        yield Session(config, target, pipeline, cache, notify, Path(scratch), locks)


def _check_policy(config: CompileConfig, pipeline: Pipeline) -> None:
    policy = policy_of(config.policy)
    if policy.quantises and "insert-quantization" not in pipeline.names:
        raise UsageError(
            f"policy '{policy.name}' needs the pass insert-quantization, and the pipeline '{pipeline}' lacks it: "
            "leave out --policy, or let the pass run (-O1 and up)"
        )


def _check_phase(config: CompileConfig, pipeline: Pipeline) -> None:
    if config.state_log < 1:
        raise UsageError(f"state_log is {config.state_log}: give 1 (states are written with every token) or more")
    if config.state_log > 1 and config.verify:
        raise UsageError(
            "state_log with --verify: the eager model writes the states that this program logs; verify the step that "
            "writes them with every token, which computes the same outputs"
        )
    if config.phase != "verify":
        return
    if "log-states" not in pipeline.names:
        raise UsageError(
            f"phase verify needs the pass log-states, and the pipeline '{pipeline}' lacks it: its recurrent states "
            "would take in drafts that are rejected later; let the pass run (-O1 and up)"
        )
    if config.verify:
        raise UsageError(
            "phase verify with --verify: the eager model writes the states that this program logs; verify the "
            "prefill of as many tokens (--phase prefill), which computes the same outputs"
        )


def _check_ranks(config: CompileConfig, pipeline: Pipeline, target: str) -> None:
    """What several ranks cannot have yet, or never; ``DeviceMesh`` refuses sizes that are none."""
    if config.micro_batches > 1 and config.pp == 1:
        raise UsageError(
            f"micro_batches {config.micro_batches}: parts of a step follow one another through stages (pp)"
        )
    if config.mesh.size == 1:
        return
    sizes = {name: size for name, size in config.mesh.sizes.items() if size > 1}
    for name, size in sizes.items():
        if SHARING[name] not in pipeline.names:
            raise UsageError(
                f"{name} {size} needs the pass {SHARING[name]}, and the pipeline '{pipeline}' lacks it: let it run "
                "(-O1 and up)"
            )
    if not 0 <= config.stage < config.pp:
        raise UsageError(f"stage {config.stage} of pp {config.pp}: stages go from 0 to {config.pp - 1}")
    told = " ".join(f"{name} {size}" for name, size in sizes.items())
    for wrong, what in (
        (target == ONNXRUNTIME, f"target {target!r}"),
        (
            target == "cpu" and config.sp > 1,
            "target 'cpu' (whose interpreter cannot exchange picks; cpu:reference can)",
        ),
        (config.phase == "verify" and config.pp > 1, "phase verify (drafts)"),
        (config.state_log > 1, f"state_log {config.state_log}"),
        (config.verify, "--verify: compare what `generate` gives with one rank's, or verify the model on one"),
        (config.check_numerics, "--check-numerics"),
    ):
        if wrong:
            raise UsageError(f"{told} with {what} is not possible: leave out one of them")


def pass_context(config: CompileConfig) -> PassContext:
    """What the passes see of a compilation for the concrete target of ``config``."""
    return PassContext(config, describe_memory=partial(describe_memory, target=config.target))


def _cache_mode(config: CompileConfig) -> str:
    """The mode asked for; but numerics are checked while passes run, which a hit would leave out."""
    return (
        {"use": "refresh", "readonly": "off"}.get(config.cache, config.cache) if config.check_numerics else config.cache
    )
