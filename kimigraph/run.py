"""``kimigraph run``: execute an artifact on seeded or given tensors and compare checksums with its manifest."""

import time
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file

from kimigraph.compiler import read_manifest, resolve_target
from kimigraph.ir.errors import UsageError
from kimigraph.ir.manifest import Manifest
from kimigraph.ir.program import InputSpec
from kimigraph.ir.seeded import checksum, same_checksum, seeded_tensor
from kimigraph.runtime.executor import Executor


def seeded(spec: InputSpec, seed: int) -> torch.Tensor:
    """The seeded tensor of one input, laid out with its strides."""
    values = seeded_tensor(spec.source, spec.shape, getattr(torch, spec.dtype), spec.kind, seed, spec.value_range)
    laid_out = torch.empty_strided(spec.shape, spec.stride, dtype=values.dtype)
    return laid_out.copy_(values)


def seeded_weights(manifest: Manifest) -> dict[str, torch.Tensor]:
    """Every weight and buffer of an artifact, seeded with the manifest's seed."""
    return {
        spec.source: seeded(spec, manifest.seed)
        for spec in manifest.inputs
        if spec.bound and spec.kind != "constant"
    }


def read_weights(directory: Path, names: set[str]) -> dict[str, torch.Tensor]:
    """The tensors ``names`` from the safetensors files of ``directory``; a missing one is an error that lists them."""
    found: dict[str, torch.Tensor] = {}
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise UsageError(f"{directory} has no *.safetensors files: give the directory that holds the model's weights")
    for path in files:
        with safe_open(path, framework="pt") as file:
            for name in names.intersection(file.keys()):
                found[name] = file.get_tensor(name)
    missing = sorted(names.difference(found))
    if missing:
        raise UsageError(f"{directory} lacks {len(missing)} weights, first {', '.join(missing[:5])}")
    return found


def run_artifact(directory: Path, weights: Path | None, inputs: Path | None, repeat: int) -> dict[str, Any]:
    """Run an artifact ``repeat`` times from the same inputs.

    Returns checksums of outputs and mutated inputs after the first step, ``seconds`` per step, and ``passed``: whether
    they are those of the manifest (None when given tensors replaced the seeded ones).
    """
    manifest = read_manifest(directory)
    resolve_target(manifest.target if manifest.target != "cuda:sm_90" else "cuda")
    wanted = {spec.source for spec in manifest.inputs if spec.bound and spec.kind != "constant"}
    bound = seeded_weights(manifest) if weights is None else read_weights(weights, wanted)
    executor = Executor(directory, bound)
    given = load_file(inputs) if inputs is not None else {}
    unknown = sorted(set(given).difference(spec.source for spec in executor.caller_inputs))
    if unknown:
        raise UsageError(f"{inputs} holds tensors that the program does not take: {', '.join(unknown[:5])}")
    start = [given.get(spec.source, seeded(spec, manifest.seed)).to(executor.device) for spec in executor.caller_inputs]
    sums: dict[str, list[float]] = {}
    seconds: list[float] = []
    for turn in range(max(repeat, 1)):
        tensors = [tensor.clone() for tensor in start]
        _synchronize(executor.device)
        began = time.perf_counter()
        outputs = executor(*tensors)
        _synchronize(executor.device)
        seconds.append(time.perf_counter() - began)
        if turn == 0:
            sums = _checksums(executor, outputs, tensors)
    seeded_run = weights is None and not given
    return {"outputs": sums, "seconds": seconds, "passed": _matches(manifest, sums) if seeded_run else None}


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _checksums(
    executor: Executor, outputs: tuple[torch.Tensor, ...], tensors: list[torch.Tensor]
) -> dict[str, list[float]]:
    seed = executor.manifest.seed
    named = {spec.name: value for spec, value in zip(executor.manifest.outputs, outputs, strict=True)}
    for spec, tensor in zip(executor.caller_inputs, tensors, strict=True):
        if spec.mutated:
            named[spec.source] = tensor
    return {name: checksum(name, value, seed) for name, value in named.items()}


def _matches(manifest: Manifest, sums: dict[str, list[float]]) -> bool | None:
    if not manifest.checksums:
        return None
    return all(same_checksum(sums[name], want, manifest.tolerance) for name, want in manifest.checksums.items())
