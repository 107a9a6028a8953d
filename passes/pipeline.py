"""A pipeline: which passes run, in which order, with which options; its text form and the default one."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from kimigraph.ir.config import ONNXRUNTIME, CompileConfig
from kimigraph.ir.errors import UsageError
from kimigraph.passes.base import Pass
from kimigraph.passes.options import parse_pass, print_pass
from kimigraph.passes.registry import BUILT_IN, PassRegistry, default_registry, unknown_name

SCHEDULING = ("overlap-communication", "assign-streams", "plan-memory")
VERIFIER = "verify-schedule"
_PASS = re.compile(r'\s*([^\s,{}"=]+)\s*(?:\{((?:"(?:[^"\\]|\\.)*"|[^"{}])*)\})?\s*(?:,|$)')


@dataclass(frozen=True)
class Pipeline:
    """A sequence of passes. ``Pipeline.parse(str(pipeline)) == pipeline``.

    The text is ``canonicalize,fuse-lightning-indexer{k-max=2048}``: names separated by commas, options in braces.
    """

    passes: tuple[Pass, ...] = ()

    @classmethod
    def parse(cls, text: str, registry: PassRegistry | None = None) -> "Pipeline":
        """The pipeline that ``text`` describes. UsageError says what cannot be read, and the nearest name."""
        registry = registry or default_registry()
        return cls(tuple(parse_pass(registry.load(name), options) for name, options in _split(text)))

    def __str__(self) -> str:
        return ",".join(print_pass(item) for item in self.passes)

    def __iter__(self) -> Iterator[Pass]:
        return iter(self.passes)

    def __len__(self) -> int:
        return len(self.passes)

    @property
    def names(self) -> list[str]:
        """The names of the passes, in order."""
        return [item.name for item in self.passes]

    def without(self, names: tuple[str, ...]) -> "Pipeline":
        """The pipeline less the passes with exactly these names."""
        return Pipeline(tuple(item for item in self.passes if item.name not in names))

    def through(self, name: str) -> "Pipeline":
        """The pipeline up to and including the first pass called ``name``. Raises UsageError when it has none."""
        if name not in self.names:
            raise UsageError(
                f"--stop-after {name}: that pass is not in the pipeline '{self}'. "
                "Add it with --passes, or name one that is."
            )
        return Pipeline(self.passes[: self.names.index(name) + 1])


OPERATOR_PASSES = (
    "canonicalize",
    "raise-kda",
    "raise-attention-residual",
    "raise-norms",
    "raise-moe",
    "fuse-lightning-indexer",
    "fuse-sparse-attention",
)
"""The passes that find operators. What plans launches and memory says nothing to another runtime."""


def default_pipeline(config: CompileConfig, registry: PassRegistry | None = None) -> Pipeline:
    """The passes that ``config`` asks for.

    ``passes`` replaces those of the optimization level (-O0: none; from -O1 the built-in passes of that level, in their
    order; for onnxruntime those that find operators), with ``verify-schedule`` at the end where one of them assigns
    streams or memory; ``disabled_passes`` and ``stop_after`` apply to either. Raises UsageError for a name that no pass
    has.
    """
    registry = registry or default_registry()
    _check_names(config, registry)
    if config.passes is not None:
        pipeline = _verified(Pipeline.parse(config.passes, registry), registry)
    elif config.opt_level == 0:
        pipeline = Pipeline()
    else:
        names = OPERATOR_PASSES if config.target == ONNXRUNTIME else tuple(BUILT_IN)
        kept = [registry.load(name) for name in names if name not in config.disabled_passes]
        pipeline = Pipeline(tuple(item() for item in kept if item.level <= config.opt_level))
        pipeline = _for_ranks(pipeline, registry) if config.tp > 1 else pipeline
    pipeline = pipeline.without(config.disabled_passes)
    return pipeline.through(config.stop_after) if config.stop_after else pipeline


def _for_ranks(pipeline: Pipeline, registry: PassRegistry) -> Pipeline:
    """Experts of which each rank has a part are summed up before what follows them, which therefore stays apart."""
    apart = parse_pass(registry.load("raise-moe"), "tail-tokens=0")
    return Pipeline(tuple(apart if item.name == apart.name else item for item in pipeline))


def _verified(pipeline: Pipeline, registry: PassRegistry) -> Pipeline:
    """A program whose streams or memory were assigned is proven safe, whoever wrote the pipeline."""
    if not {*SCHEDULING} & {*pipeline.names} or VERIFIER in pipeline.names:
        return pipeline
    return Pipeline((*pipeline.passes, registry.load(VERIFIER)()))


def _check_names(config: CompileConfig, registry: PassRegistry) -> None:
    if config.opt_level not in range(4):
        raise UsageError(f"optimization level {config.opt_level}: use 0, 1, 2 or 3.")
    stop_after = (config.stop_after,) if config.stop_after else ()
    for option, names in (
        ("--disable-pass", config.disabled_passes),
        ("--stop-after", stop_after),
        ("--require-fusion", config.required_fusions),
    ):
        for name in names:
            if name not in registry.names:
                raise unknown_name(f"{option}: pass", name, registry.names)
    for name in config.required_fusions:
        if not registry.load(name).fusion:
            fusions = [known for known in registry.names if registry.load(known).fusion]
            raise UsageError(f"--require-fusion {name}: that pass is no fusion. Fusions: {', '.join(fusions)}.")


def _split(text: str) -> Iterator[tuple[str, str]]:
    """(name, text between the braces) of each pass."""
    text, position = text.strip(), 0
    while position < len(text) or (position and text[position - 1] == ","):
        match = _PASS.match(text, position)
        if match is None:
            raise UsageError(
                f"pipeline '{text}': cannot read a pass at '{text[position:].strip()}'; "
                "write name or name{option=value ...}, passes separated by commas."
            )
        yield match[1], match[2] or ""
        position = match.end()
