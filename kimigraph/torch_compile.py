"""``torch.compile(model, backend="kimigraph")``: graphs of TorchDynamo on the same road as everything else."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from itertools import count
from operator import is_
from pathlib import Path
from typing import Any, cast

import torch

from kimigraph.adapters.dynamo import DynamoGraph, read_graph
from kimigraph.api import Compiled, optimize
from kimigraph.ir.config import CompileConfig
from kimigraph.ir.errors import CaptureError, UsageError
from kimigraph.ir.report import CompileReport

LOG = logging.getLogger(__name__)
"""``TORCH_LOGS=+kimigraph`` shows it: a line for each graph, and one for each program that is compiled for it."""

MODES: dict[str, dict[str, Any]] = {
    "default": {},
    "reduce-overhead": {"cuda_graph": True},
    "max-autotune": {"opt_level": 3, "cuda_graph": True},
    "max-autotune-no-cudagraphs": {"opt_level": 3},
}
"""What a mode of ``torch.compile`` sets; explicit options win. CUDA graphs are for CUDA inputs alone."""

MODEL_OPTIONS = (
    "batch",
    "cache_layout",
    "context",
    "dtype",
    "overrides",
    "page_size",
    "pages",
    "phase",
    "policy",
    "random_weights",
    "state_log",
    "tokens",
)
"""Fields of ``CompileConfig`` that say what the model is, or change its caches: here the calls say it."""

GraphFunction = Callable[..., Any]
MAX_BINDINGS = 64


@dataclass
class CompiledGraph:
    """One graph of Dynamo, compiled when it is first called, and once more for each other shape of its inputs.

    Dynamo runs the code of a layer for every instance of the layer: parameters that were not seen before are bound to
    programs of their own, which the compile cache makes cheap.
    """

    graph: DynamoGraph
    config: CompileConfig
    fallback: bool
    programs: list[tuple[tuple[torch.Tensor, ...], Compiled]] = field(default_factory=lambda: [])
    eager: str = ""
    """Why the graph runs eagerly; empty where it does not."""

    def __call__(self, *inputs: Any) -> Any:
        if self.eager:
            return self.graph.module(*inputs)
        held = [inputs[place] for place, _ in self.graph.held]
        free = [inputs[place] for place in self.graph.free]
        for number, (known, compiled) in enumerate(self.programs):
            if all(map(is_, known, held)):
                if number:
                    self.programs.insert(0, self.programs.pop(number))
                return compiled(*free)
        compiled = self._compile(held, free)
        return self.graph.module(*inputs) if compiled is None else compiled(*free)

    def _compile(self, held: Sequence[torch.Tensor], free: Sequence[Any]) -> Compiled | None:
        """Programs for the parameters ``held``; None where the graph cannot be captured and may run eagerly."""
        config = _for_device(self.config, [*held, *free])
        LOG.info("compiling %s for %s", self.graph.name, config.target)
        try:
            compiled = optimize(self.graph.bound_to(held), tuple(free), config)
        except CaptureError as error:
            if not self.fallback:
                raise
            self.eager = str(error)
            LOG.warning("%s runs eagerly: %s", self.graph.name, error)
            return None
        self.programs = [(tuple(held), compiled), *self.programs[: MAX_BINDINGS - 1]]
        for entry in compiled.report().fusions:
            LOG.debug("%s: %s found %s", self.graph.name, entry["rule"], entry["count"])
        return compiled


def _for_device(config: CompileConfig, values: Sequence[Any]) -> CompileConfig:
    """``config`` for the device that the inputs lie on, where it leaves the target open."""
    on_gpu = any(isinstance(value, torch.Tensor) and value.device.type == "cuda" for value in values)
    target = config.target if config.target != "auto" else "cuda" if on_gpu else "cpu:reference"
    return replace(config, target=target, cuda_graph=config.cuda_graph and target.startswith("cuda"))


class TorchBackend:
    """A backend for ``torch.compile`` that remembers what it compiled.

    ``torch.compile(model, backend=TorchBackend(target="cpu"))`` is ``torch.compile(model, backend="kimigraph",
    options={"target": "cpu"})`` with ``report()`` and ``explain()`` for all of its graphs. Options are the fields of
    ``CompileConfig`` that do not describe the model, and ``fallback``: ``"refuse"`` (default) raises for a graph that
    cannot be compiled - one that gradients flow through, one that cannot be captured -, ``"eager"`` runs it as it is,
    with a warning. ``mode`` is a mode of ``torch.compile``. Raises UsageError for other options.
    """

    def __init__(self, mode: str | None = None, **options: Any) -> None:
        fallback = options.pop("fallback", "refuse")
        if fallback not in ("refuse", "eager"):
            raise UsageError(f"option fallback={fallback!r}: use 'refuse' or 'eager'")
        self._config = _configured(mode or "default", options)
        self._fallback = fallback == "eager"
        self.graphs: list[CompiledGraph] = []
        """The graphs in the order in which Dynamo made them."""

    def __call__(self, module: torch.fx.GraphModule, inputs: Sequence[Any]) -> GraphFunction:
        """Take one graph of Dynamo. CaptureError for a graph that gradients flow through, unless it may run eagerly."""
        compiled = CompiledGraph(read_graph(module, inputs), self._numbered(), self._fallback)
        if torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in inputs):
            compiled.eager = (
                "gradients flow through it, and kimigraph compiles inference alone: call the model under "
                "torch.no_grad() or torch.inference_mode(), or give options={'fallback': 'eager'}"
            )
            if not self._fallback:
                raise CaptureError(f"{compiled.graph.name} cannot be compiled: {compiled.eager}")
            LOG.warning("%s runs eagerly: %s", compiled.graph.name, compiled.eager)
        elif not compiled.graph.computes:
            compiled.eager = "it computes nothing"
        self.graphs.append(compiled)
        LOG.info("graph %d is of %s%s", len(self.graphs), compiled.graph.name, _ending(compiled))
        return compiled

    def _numbered(self) -> CompileConfig:
        """The options for the next graph: dumps of several graphs go below one directory."""
        dumps = self._config.dump_passes
        if dumps is None:
            return self._config
        free = next(n for n in count(1) if not (Path(dumps) / f"graph-{n}").exists())
        return replace(self._config, dump_passes=str(Path(dumps) / f"graph-{free}"))

    def report(self) -> list[CompileReport]:
        """The report of each graph that was called: that of the program used last."""
        return [graph.programs[0][1].report() for graph in self.graphs if graph.programs]

    def explain(self, rule: str | None = None) -> str:
        """What became of each graph, why it ends where it does, and what was fused; ``rule``: its remarks as well."""
        lines = [f"{len(self.graphs)} graphs, {sum(bool(graph.graph.reason) for graph in self.graphs)} graph breaks"]
        for number, graph in enumerate(self.graphs, 1):
            lines.append(f"graph {number}, {graph.graph.name}: {_state(graph)}{_ending(graph)}")
            if rule is not None and graph.programs:
                lines += [f"  {line}" for line in _remarks(graph, rule)]
        return "\n".join(lines)


def _state(graph: CompiledGraph) -> str:
    if graph.eager:
        return f"runs eagerly: {graph.eager}"
    if not graph.programs:
        return "not called yet"
    report = graph.programs[0][1].report()
    fused = ", ".join(f"{entry['rule']} {entry['count']}" for entry in report.fusions if entry["count"])
    return f"{report.target}, {report.graph['nodes_after']} nodes, fused: {fused or 'nothing'}"


def _remarks(graph: CompiledGraph, rule: str) -> list[str]:
    try:
        return graph.programs[0][1].explain(rule).splitlines()
    except UsageError as error:
        return [str(error)]


def _ending(graph: CompiledGraph) -> str:
    return f"; ends with a graph break: {graph.graph.reason}" if graph.graph.reason else ""


def _configured(mode: str, options: dict[str, Any]) -> CompileConfig:
    known = sorted({entry.name for entry in fields(CompileConfig)} - set(MODEL_OPTIONS))
    if mode not in MODES:
        raise UsageError(f"mode {mode!r} of torch.compile is not known; known are {', '.join(MODES)}")
    for name in options:
        if name in MODEL_OPTIONS:
            raise UsageError(
                f"option {name!r} describes the model, and under torch.compile its calls do: leave it out, or use "
                "kimigraph.optimize"
            )
        if name not in known:
            near = get_close_matches(name, known, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join([*known, 'fallback'])}"
            raise UsageError(f"option {name!r} is not known; {hint}")
    settings: dict[str, Any] = {"report": False, **MODES[mode], **options}
    for name, value in settings.items():
        settings[name] = tuple(cast("list[Any]", value)) if isinstance(value, list) else value
    return CompileConfig(**settings)


def backend(
    module: torch.fx.GraphModule, inputs: Sequence[Any], mode: str | None = None, options: dict[str, Any] | None = None
) -> GraphFunction:
    """The entry point ``kimigraph`` of ``torch_dynamo_backends``; errors as in ``TorchBackend``."""
    return TorchBackend(mode, **(options or {}))(module, inputs)
