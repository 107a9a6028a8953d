"""``kimigraph run``: execute an artifact on seeded or given tensors and compare checksums with its manifest."""

import time
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch.profiler import record_function

from kimigraph.capture.load import FILES, weights_of_file
from kimigraph.compiler import read_manifest
from kimigraph.ir.errors import UsageError
from kimigraph.ir.manifest import Manifest
from kimigraph.ir.program import InputSpec
from kimigraph.ir.script import seeded_input, with_strides
from kimigraph.ir.seeded import checksum, same_checksum
from kimigraph.runtime.executor import Executor, device_of, laid_out, require_runnable
from kimigraph.runtime.graphs import graph_mode
from kimigraph.runtime.parallel import gathered, join_ranks
from kimigraph.weights import Watch, layout_of, read_weights, unwatched


def seeded(spec: InputSpec, manifest: Manifest, rank: int = 0) -> torch.Tensor:
    """The seeded tensor of one input, as ``program.py`` makes it: weights by the seed of the model's random weights.

    Of what several ranks share out, the part of ``rank``.
    """
    own = manifest.info.get("weight_seed") if spec.kind == "weight" else None
    return with_strides(seeded_input(spec, manifest.seed if own is None else own, rank), spec.stride)


def seeded_weights(manifest: Manifest) -> dict[str, torch.Tensor]:
    """The weights of an artifact of a randomly initialised model, by name. Buffers are not among them."""
    return {spec.source: seeded(spec, manifest) for spec in manifest.bound if spec.kind == "weight"}


def program_weights(
    manifest: Manifest, directory: Path, watch: Watch = unwatched, rank: int = 0
) -> dict[str, torch.Tensor]:
    """The weights of a program from the checkpoint in ``directory``, on the program's device, by name: ``rank``'s part.

    ``directory`` may also be the ``.onnx`` or ``.pt2`` file that the program was compiled from. Raises UsageError that
    lists all missing and misshapen ones.
    """
    if directory.suffix in FILES and directory.is_file():
        return _file_weights(manifest, directory)
    specs = [spec for spec in manifest.bound if spec.kind == "weight"]
    layout = layout_of(str(manifest.info.get("model_type", "")))
    device, packed = device_of(manifest.target), manifest.packed_weights()
    return read_weights(directory, specs, layout, device, watch, packed, rank)


def _file_weights(manifest: Manifest, path: Path) -> dict[str, torch.Tensor]:
    """The parameters and buffers that ``path`` holds, those that the program binds."""
    held = weights_of_file(path)
    wanted = {spec.source: spec for spec in manifest.bound if spec.kind != "constant"}
    lost = [n for n, spec in wanted.items() if n not in held or tuple(held[n].shape) != spec.shape]
    if lost:
        raise UsageError(
            f"{path} is not what the program was compiled from: it has no {', '.join(sorted(lost)[:5])} of that shape"
        )
    return {name: held[name].detach().to(device_of(manifest.target)) for name in wanted}


def run_artifact(
    directory: Path,
    weights: Path | None,
    inputs: Path | None,
    repeat: int,
    watch: Watch = unwatched,
    cuda_graph: bool = False,
) -> dict[str, Any]:
    """Run an artifact ``repeat`` times from the same inputs.

    Returns checksums of outputs and mutated inputs after the first step, ``seconds`` per step, and ``passed``: whether
    they are those of the manifest (None when given tensors replaced the seeded ones, or it has none). ``watch``
    is told how much of ``weights`` has been read. ``cuda_graph``: the step is captured first, and every step replayed.
    """
    manifest = read_manifest(directory)
    require_runnable(manifest.target)
    rank = join_ranks(manifest.mesh, manifest.target)
    graphs = graph_mode(manifest.target) if cuda_graph else None
    bound = {} if weights is None else program_weights(manifest, weights, watch, rank)
    for spec in manifest.bound:
        if spec.kind != "constant" and spec.source not in bound:
            bound[spec.source] = seeded(spec, manifest, rank)
    executor = Executor(directory, bound, give_up=True)
    given = _read_inputs(inputs, executor) if inputs is not None else {}
    start = [_starting(spec, given, manifest, rank).to(executor.device) for spec in executor.caller_inputs]
    sums: dict[str, list[float]] = {}
    seconds: list[float] = []
    tensors = [laid_out(tensor, spec) for tensor, spec in zip(start, executor.caller_inputs, strict=True)]
    if graphs is not None:
        graphs.adopt(executor)
        graphs.capture(executor, tensors)
    for turn in range(max(repeat, 1)):
        for tensor, values in zip(tensors, start, strict=True):
            tensor.copy_(values)
        _synchronize(executor.device)
        began = time.perf_counter()
        with record_function(f"step {turn + 1}"):
            outputs = executor(*tensors)
            _synchronize(executor.device)
        seconds.append(time.perf_counter() - began)
        if turn == 0:
            sums = _checksums(executor, outputs, tensors)
    seeded_run = weights is None and not given
    return {"outputs": sums, "seconds": seconds, "passed": _matches(manifest, sums) if seeded_run else None}


def _starting(spec: InputSpec, given: dict[str, torch.Tensor], manifest: Manifest, rank: int) -> torch.Tensor:
    """The tensor that an input starts as: the rank's part of the given one, or the seeded one."""
    if spec.source not in given:
        return seeded(spec, manifest, rank)
    return spec.taken(given[spec.source], rank)


def _read_inputs(path: Path, executor: Executor) -> dict[str, torch.Tensor]:
    """The caller's tensors of a safetensors file; one that the program does not take as it is is an error."""
    try:
        given = load_file(path)
    except (OSError, SafetensorError) as error:
        raise UsageError(f"{path} is no readable safetensors file ({error}): give one with tensors by name") from error
    known = {spec.source: spec for spec in executor.caller_inputs}
    unknown = sorted(set(given).difference(known))
    if unknown:
        raise UsageError(
            f"{path} holds tensors that the program does not take: {', '.join(unknown[:5])}; "
            f"it takes {', '.join(known)}"
        )
    for name, tensor in given.items():
        wanted = known[name]
        if tuple(tensor.shape) != wanted.whole_shape or str(tensor.dtype) != f"torch.{wanted.dtype}":
            raise UsageError(
                f"{path}: {name} is {tensor.dtype} {tuple(tensor.shape)}, the program takes torch.{wanted.dtype} "
                f"{wanted.whole_shape}"
            )
    return given


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _checksums(
    executor: Executor, outputs: tuple[torch.Tensor, ...], tensors: list[torch.Tensor]
) -> dict[str, list[float]]:
    manifest = executor.manifest
    given = dict(zip((spec.source for spec in executor.caller_inputs), tensors, strict=True)) | executor.bound
    named = {spec.name: value for spec, value in zip(manifest.outputs, outputs, strict=True)}
    named |= {spec.source: gathered(spec, given[spec.source]) for spec in manifest.inputs if spec.mutated}
    return {name: checksum(name, value, manifest.seed) for name, value in named.items()}


def _matches(manifest: Manifest, sums: dict[str, list[float]]) -> bool | None:
    if not manifest.checksums:
        return None
    return all(same_checksum(sums[name], want, manifest.tolerance) for name, want in manifest.checksums.items())
