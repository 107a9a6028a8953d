"""``kimigraph run`` on the artifacts of a pipeline: each rank its stage, or one process all of them in turn."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from kimigraph.ir.env import started_ranks
from kimigraph.ir.errors import UsageError
from kimigraph.ir.manifest import Manifest
from kimigraph.ir.program import InputSpec
from kimigraph.ir.seeded import checksum
from kimigraph.ir.stages import BOUNDARY, Stage, directory_of, holds
from kimigraph.run import program_weights, run_artifact, seeded
from kimigraph.runtime.executor import Executor, laid_out
from kimigraph.runtime.generation.stage_step import PipelinedStep, StagePart
from kimigraph.runtime.graphs import graph_mode
from kimigraph.runtime.parallel import gathered, join_ranks
from kimigraph.runtime.parallel.stage_links import GroupLinks, Links, queue_links
from kimigraph.runtime.parallel.stages import facts_of, require_agreement, require_pipeline, stage_number
from kimigraph.weights import Watch, unwatched

Sums = dict[str, list[float]]


def stages_in(directory: Path) -> int:
    """How many stages the pipeline in ``directory`` has; 0 where it holds none."""
    first = directory / directory_of(0)
    if not (first / "manifest.json").exists() or (directory / "manifest.json").exists():
        return 0
    stage = Stage.of(Manifest.read(first).info)
    return 0 if stage is None else stage.stages


def run_stages(
    directory: Path,
    weights: Path | None,
    inputs: Path | None,
    repeat: int,
    watch: Watch = unwatched,
    cuda_graph: bool = False,
) -> dict[str, Any]:
    """Run a step of the pipeline in ``directory`` ``repeat`` times; the result is that of ``run_artifact``.

    ``outputs`` are those of the model and all updated caches. ``passed``: whether each stage by itself, on seeded
    values in place of what arrives, gives the checksums of its manifest; None when tensors were given.
    """
    count = stages_in(directory)
    places = [directory / directory_of(number) for number in range(count)]
    manifests = [Manifest.read(place) for place in places]
    require_pipeline([facts_of(manifest) for manifest in manifests])
    mesh = replace(manifests[0].mesh, pp=count)
    alone = started_ranks() is None and mesh.ways == 1
    rank = 0 if alone else join_ranks(mesh, manifests[0].target)
    if not alone:
        require_agreement(manifests[stage_number(count)])
    own = range(count) if alone else [stage_number(count)]
    passed = None
    if weights is None and inputs is None:
        passed = [run_artifact(places[number], None, None, 1)["passed"] for number in own]
    links: Sequence[Links] = queue_links(count) if alone else [GroupLinks()] * count
    given = {} if inputs is None else _read(inputs)
    stages = [_stage(places[number], links[number], weights, given, rank, watch, cuda_graph) for number in own]
    sums: Sums = {}
    seconds: list[float] = []
    for turn in range(max(repeat, 1)):
        for stage in stages:
            stage.restart()
        _synchronize(stages[0].executor.device)
        began = time.perf_counter()
        for stage in stages:
            stage.step.again()
        _synchronize(stages[0].executor.device)
        seconds.append(time.perf_counter() - began)
        if turn == 0:
            sums = {name: value for stage in stages for name, value in stage.sums().items()}
    found = [(sums, passed)] if alone else _of_all_ranks((sums, passed))
    verdicts = [verdict for _, each in found for verdict in each or []]
    return {
        "outputs": {name: value for each, _ in found for name, value in each.items()},
        "seconds": seconds,
        "passed": all(verdicts) if verdicts and None not in verdicts else None,
        "stages": count,
    }


@dataclass(frozen=True)
class _Stage:
    """A stage bound to its tensors, which start as ``start``."""

    executor: Executor
    part: StagePart
    step: PipelinedStep
    tensors: dict[str, Tensor]
    start: dict[str, Tensor]

    def restart(self) -> None:
        """Caches and inputs as before the first step."""
        for name, tensor in self.tensors.items():
            tensor.copy_(self.start[name])

    def sums(self) -> Sums:
        """Checksums of what the model returns and of the caches of this stage; all its ranks must ask."""
        manifest = self.executor.manifest
        known = self.tensors | self.executor.bound
        named = {spec.source: gathered(spec, known[spec.source]) for spec in manifest.inputs if spec.mutated}
        if self.part.stage.is_last:
            outputs = zip(manifest.outputs, self.part.made, strict=True)
            named = {spec.name: value for spec, value in outputs} | named
        return {name: checksum(name, value, manifest.seed) for name, value in named.items()}


def _stage(
    directory: Path,
    links: Links,
    weights: Path | None,
    given: dict[str, Tensor],
    rank: int,
    watch: Watch,
    cuda_graph: bool,
) -> _Stage:
    manifest = Manifest.read(directory)
    bound = {} if weights is None else program_weights(manifest, weights, watch, rank)
    for spec in manifest.bound:
        if spec.kind != "constant" and spec.source not in bound:
            bound[spec.source] = seeded(spec, manifest, rank)
    executor = Executor(directory, bound, give_up=True)
    specs = [spec for spec in executor.caller_inputs if not spec.source.startswith(BOUNDARY)]
    start = {spec.source: _starting(spec, given, manifest, rank).to(executor.device) for spec in specs}
    tensors = {spec.source: laid_out(start[spec.source], spec) for spec in specs}
    if cuda_graph:
        graph_mode(manifest.target).adopt(executor)
    part = StagePart(executor, tensors, int(manifest.info.get("batch", 1)), int(manifest.info.get("tokens", 1)))
    unknown = [name for name in given if name not in tensors and _is_own(name, part.stage)]
    if unknown:
        raise UsageError(f"the inputs hold {', '.join(sorted(unknown)[:5])}, which the pipeline does not take")
    return _Stage(executor, part, PipelinedStep([part], links), tensors, start)


def _is_own(name: str, stage: Stage) -> bool:
    """Whether a tensor of that name could only be for this stage."""
    return "." in name and holds(name, stage.layers)


def _starting(spec: InputSpec, given: dict[str, Tensor], manifest: Manifest, rank: int) -> Tensor:
    if spec.source not in given:
        return seeded(spec, manifest, rank)
    value = given[spec.source]
    if tuple(value.shape) != spec.whole_shape or str(value.dtype) != f"torch.{spec.dtype}":
        raise UsageError(
            f"{spec.source} is {value.dtype} {tuple(value.shape)}, the pipeline takes torch.{spec.dtype} "
            f"{spec.whole_shape}"
        )
    return spec.taken(value, rank)


def _read(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise UsageError(f"{path} is no readable safetensors file ({error}): give one with tensors by name") from error


def _of_all_ranks(mine: tuple[Sums, list[bool | None] | None]) -> list[tuple[Sums, list[bool | None] | None]]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
