"""The isolated input preparation of an indexer, as the compiler makes it: serial, in branches, merged.

A DSA layer of K3.1 is captured and fused, its prolog cut out as ``split-indexer-prolog`` prices it, and compiled three
ways. ``serial`` has the kernels of no merging pass, one after the other; the others are what the pass chooses between.
"""

import json
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kimigraph.bench.protocol import Timing, relative_error, sets_for_cold_cache, time_in_graph
from kimigraph.bench.replay import named_replay
from kimigraph.capture import capture_module
from kimigraph.capture.named_caches import named_cache_hints
from kimigraph.codegen import build_artifact
from kimigraph.ir.config import CompileConfig
from kimigraph.ir.device import target_device
from kimigraph.ir.errors import NumericsError
from kimigraph.ir.program import CapturedProgram
from kimigraph.ir.trace import Track, read_timeline, write_timeline
from kimigraph.models.kimi_k31.cache import Positions
from kimigraph.models.kimi_k31.configuration import KimiK31Config
from kimigraph.models.kimi_k31.mla import LatentAttention
from kimigraph.passes import Pass, Pipeline, default_pipeline, run_pipeline
from kimigraph.passes.assign_streams import AssignStreams
from kimigraph.passes.prolog.branches import Prolog, PrologFinder
from kimigraph.passes.prolog.pricing import cut, isolated
from kimigraph.passes.scheduling.planned import planned_track
from kimigraph.passes.split_indexer_prolog import MERGING
from kimigraph.runtime.executor import Executor
from kimigraph.session import pass_context
from kimigraph.tools.measured import measured_track

BATCHES = (1, 8, 64)
CONTEXT = 4096
TOLERANCE = 2e-2
SPLIT = "split-indexer-prolog"
FORMS, ARTIFACT, WEIGHTS, SCHEDULE = "forms.json", "program", "weights.pt", "planned.json"
"""Files of a directory that compiled forms are kept in."""

K31: dict[str, Any] = {
    "model_type": "kimi_k31",
    "vocab_size": 256,
    "hidden_size": 2304,
    "num_hidden_layers": 1,
    "num_attention_heads": 32,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "linear_attn_config": {"full_attn_layers": [1], "kda_layers": [], "num_heads": 32, "head_dim": 128},
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 2048,
    "index_rope": "none",
    "attn_res_block_size": 2,
    "intermediate_size": 9216,
    "num_experts": 256,
    "num_experts_per_token": 8,
    "moe_intermediate_size": 1024,
    "routed_expert_hidden_size": 1152,
    "dtype": "bfloat16",
}
"""K3.1 at width; only its DSA layer is made."""


class DsaLayer(nn.Module):
    """The attention of one layer, with the caches in a dict as the whole model has them."""

    def __init__(self, config: KimiK31Config) -> None:
        super().__init__()
        self.self_attn = LatentAttention(config)

    def forward(self, x: Tensor, lengths: Tensor, cache: dict[str, Tensor]) -> Tensor:
        """``x`` [B, 1, d] behind ``lengths`` [B] cached tokens."""
        latent, rope, keys = (cache[f"cache.0.{part}"] for part in ("latent", "rope", "index_key"))
        return self.self_attn(x, Positions.after(lengths, x.shape[1], latent.shape[1]), latent, rope, keys)


def captured_layer(batch: int, config: CompileConfig, device: str, fields: dict[str, Any]) -> CapturedProgram:
    """A decode step of the layer, fused as far as the splitting pass."""
    model_config = KimiK31Config.from_dict(fields)
    torch.manual_seed(0)
    with torch.device(device):
        layer = DsaLayer(model_config)
        for name, parameter in layer.named_parameters():
            scale, shift = (0.1, 1.0) if "norm" in name else (parameter.shape[-1] ** -0.5, 0.0)
            parameter.data.normal_(std=scale).add_(shift)
        widths = {
            "latent": model_config.kv_lora_rank,
            "rope": model_config.qk_rope_head_dim,
            "index_key": model_config.index_head_dim,
        }
        cache = {
            f"cache.0.{part}": torch.randn(batch, config.context or CONTEXT, width).to(model_config.torch_dtype)
            for part, width in widths.items()
        }
        x = torch.randn(batch, 1, model_config.hidden_size).to(model_config.torch_dtype)
        lengths = torch.full((batch,), (config.context or CONTEXT) - 2, dtype=torch.int32)
        args = (x, lengths, cache)
        program = capture_module(layer, args, {}, config, named_cache_hints(layer, args, {}))
    names = default_pipeline(config).names
    before = Pipeline(tuple(item for item in default_pipeline(config) if names.index(item.name) < names.index(SPLIT)))
    run_pipeline(program, before, pass_context(config))
    return program


def form(
    program: CapturedProgram, config: CompileConfig, merging: bool, branches: bool, force: bool
) -> CapturedProgram:
    """The prolog alone, put through the passes that follow."""
    finder = PrologFinder(program.graph_module.graph)
    prolog: Prolog = finder.find(next(finder.indexers()))
    alone = isolated(program, prolog, prolog.branches if branches else None)
    alone.tensors.update(
        {spec.name: program.tensors[spec.name] for spec in alone.inputs if spec.name in program.tensors}
    )
    items: Sequence[Pass] = tuple(default_pipeline(config))
    names = [item.name for item in items]
    after = [item for item in items if names.index(item.name) > names.index(SPLIT)]
    kept = [item for item in after if merging or item.name not in MERGING]
    streams = names.index("assign-streams")
    run_pipeline(
        alone, Pipeline(tuple(item for item in kept if names.index(item.name) < streams)), pass_context(config)
    )
    alone = cut(alone)
    last = [AssignStreams(force=force, whole=True), *(item for item in kept if names.index(item.name) > streams)]
    run_pipeline(alone, Pipeline(tuple(last)), pass_context(config))
    return alone


def forms(program: CapturedProgram, config: CompileConfig) -> dict[str, CapturedProgram]:
    """All that is compared; ``serial`` first."""
    one = replace(config, streams=1)
    return {
        "serial": form(program, one, merging=False, branches=False, force=False),
        "split": form(program, config, merging=True, branches=True, force=False),
        "split, forced": form(program, config, merging=True, branches=True, force=True),
        "merged": form(program, one, merging=True, branches=False, force=False),
        "merged, forked": form(program, config, merging=True, branches=False, force=False),
    }


@dataclass(frozen=True)
class BuiltForm:
    """A form of the prolog as an artifact: where it lies, bound to its weights, and its planned schedule."""

    directory: Path
    executor: Executor
    planned: Track


def built_forms(batch: int, kept: Path) -> dict[str, BuiltForm]:
    """All forms, out of ``kept`` where a call before this one left them; ``serial`` first."""
    root = kept / f"indexer_prolog_b{batch}"
    if not (root / FORMS).exists():
        config = CompileConfig(target="cuda", batch=batch, context=CONTEXT)
        programs = forms(captured_layer(batch, config, "cuda", K31), config)
        root.mkdir(parents=True, exist_ok=True)
        for name, program in programs.items():
            _build(root / _file_name(name), name, program)
        (root / FORMS).write_text(json.dumps(list(programs)) + "\n", encoding="utf-8")
    names: list[str] = json.loads((root / FORMS).read_text(encoding="utf-8"))
    return {name: _load(root / _file_name(name)) for name in names}


def point(batch: int, timelines: Path | None = None, kept: Path | None = None) -> dict[str, Any]:
    """One batch: microseconds of each form in a CUDA graph with cold weights, and what they are to ``serial``.

    ``timelines``: the file that takes the planned and the measured schedule of each form for Perfetto. ``kept``: a
    directory that the compiled forms stay in, and are taken from.
    """
    found: dict[str, Timing] = {}
    kernels: dict[str, int] = {}
    target = ""
    reference: dict[str, Tensor] | None = None
    tracks: list[Track] = []
    with tempfile.TemporaryDirectory() as scratch, torch.no_grad():
        for name, built in built_forms(batch, kept or Path(scratch)).items():
            kernels[name], target = built.executor.manifest.launches, built.executor.manifest.target
            results = _results(built.executor)
            reference = reference or results
            _check(name, results, reference)
            found[name] = _time(built.executor)
            if timelines is not None:
                tracks += _tracks(name, built)
    if timelines is not None:
        write_timeline(timelines, tracks)
    serial = found["serial"].median
    return {
        "batch": batch,
        "target": target,
        "kernels": kernels,
        "us": {name: timing.as_dict() for name, timing in found.items()},
        "ratio": {name: round(serial / timing.median, 3) for name, timing in found.items()},
    }


def planned_tracks(batch: int) -> list[Track]:
    """The planned schedule of each form, without a GPU."""
    config = CompileConfig(target="cuda:sm_90", batch=batch, context=CONTEXT)
    compiled = forms(captured_layer(batch, config, "cpu", K31), config)
    return [_planned(name, program) for name, program in compiled.items()]


def line(row: dict[str, Any]) -> str:
    """One point for people."""
    told = [
        f"{name} {time['median']:.2f} us ({row['kernels'][name]} launches, {row['ratio'][name]:.2f})"
        for name, time in row["us"].items()
    ]
    return f"B {row['batch']:3} prolog of a DSA layer of K3.1: " + "; ".join(told)


def _inputs(executor: Executor) -> list[Tensor]:
    """The caller's tensors of a prolog: what the layer hands it, and caches."""
    generator = torch.Generator("cuda").manual_seed(1)
    made: list[Tensor] = []
    for spec in sorted(executor.caller_inputs, key=lambda spec: spec.source):
        dtype = getattr(torch, spec.dtype)
        if dtype.is_floating_point:
            made.append(torch.randn(spec.shape, device="cuda", generator=generator).to(dtype))
        else:
            made.append(torch.full(spec.shape, CONTEXT - 2, device="cuda", dtype=dtype))
    by_source = dict(zip(sorted(spec.source for spec in executor.caller_inputs), made, strict=True))
    return [by_source[spec.source] for spec in executor.caller_inputs]


def _results(executor: Executor) -> dict[str, Tensor]:
    """Outputs and updated caches of one step by their names, the same in every form."""
    given = _inputs(executor)
    outputs = executor(*given)
    named = {spec.source: value for spec, value in zip(executor.manifest.outputs, outputs, strict=True)}
    named |= {spec.source: value for spec, value in zip(executor.caller_inputs, given, strict=True) if spec.mutated}
    return {name: value.clone() for name, value in named.items()}


def _check(name: str, found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    for source, want in wanted.items():
        error = relative_error(found[source], want)
        if not error <= TOLERANCE:
            raise NumericsError(f"bench prolog, {name}: {source} differs from the serial form by {error:.1e}")


def _calls(executor: Executor) -> list[Callable[[], Any]]:
    """Calls of the step on several copies of the weights, so that each finds its own outside the L2 cache."""
    template, places = executor.argument_template()
    for place, tensor in zip(places, _inputs(executor), strict=True):
        template[place] = tensor
    nbytes = sum(tensor.nbytes for place, tensor in enumerate(template) if place not in places)
    copies = [
        [value if place in places else value.clone() for place, value in enumerate(template)]
        for _ in range(sets_for_cold_cache(nbytes))
    ]
    return [partial(executor.step, *arguments) for arguments in copies]


def _time(executor: Executor) -> Timing:
    return time_in_graph(_calls(executor))


def _tracks(name: str, built: BuiltForm) -> list[Track]:
    """The planned schedule of a form and a measured one, of a call whose weights are not in the cache."""
    replay, names, _ = named_replay(built.directory, _calls(built.executor)[0])
    title = f"{name}, measured: one replay on {torch.cuda.get_device_name()}"
    return [built.planned, measured_track(replay, names, built.planned, title)]


def _build(root: Path, name: str, program: CapturedProgram) -> None:
    shutil.rmtree(root, ignore_errors=True)  # what an interrupted call left
    (root / ARTIFACT).mkdir(parents=True)
    build_artifact(program, "cuda", root / ARTIFACT, self_test=False)
    torch.save({spec.source: program.tensors[spec.name] for spec in program.inputs if spec.bound}, root / WEIGHTS)
    write_timeline(root / SCHEDULE, [_planned(name, program)])


def _load(root: Path) -> BuiltForm:
    weights: dict[str, Tensor] = torch.load(root / WEIGHTS, weights_only=True)
    planned = read_timeline(root / SCHEDULE)[0]
    return BuiltForm(root / ARTIFACT, Executor(root / ARTIFACT, weights), planned)


def _file_name(name: str) -> str:
    return name.replace(", ", "_")


def _planned(name: str, program: CapturedProgram) -> Track:
    planned = planned_track(program.graph_module.graph, target_device("cuda")).without("source")
    return replace(planned, title=f"{name}, {planned.title}")
