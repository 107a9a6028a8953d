"""The self-test of an artifact: checksums of one step on seeded tensors, computed with the operators' references."""

from math import prod

import torch

from kimigraph.codegen.constants import folded_constants
from kimigraph.ir.lock_step import run_ranks
from kimigraph.ir.program import CapturedProgram
from kimigraph.ir.script import make_inputs
from kimigraph.ir.seeded import checksum

REFERENCE = "cpu:reference"
LARGEST = 2 << 30
"""Bytes of seeded tensors above which ``build_artifact`` leaves the self-test out: it runs on the CPU."""

_TOLERANCE = {"bfloat16": 2e-2, "float16": 5e-3}


def tolerance_of(program: CapturedProgram) -> float:
    """What a checksum may differ by, relative to its sum of magnitudes, between machines and kernels.

    1e-4 for float32. A half-precision model rounds every intermediate, each kernel in its own order: one rounding is
    2**-9 (bfloat16) or 2**-12 (float16) of a value, and some tens of them are allowed for.
    """
    return max((_TOLERANCE.get(spec.dtype, 1e-4) for spec in program.inputs), default=1e-4)


def seeded_bytes(program: CapturedProgram) -> int:
    """Bytes that the seeded tensors of one step take."""
    values = (node.meta["val"] for node in program.placeholders.values())
    return sum(value.numel() * value.element_size() for value in values)


def reference_checksums(program: CapturedProgram, seed: int) -> dict[str, list[float]]:
    """Checksums by name: outputs first, then inputs that the step updates. Runs the graph itself, not program.py.

    Of a program for several ranks all run here, and what they share is gathered.

    Weights are those of ``info["weight_seed"]`` where the model's random weights have a seed of their own.
    """
    folded = folded_constants(program)
    constants = {spec.source: folded[spec.name] for spec in program.inputs if spec.kind == "constant"}
    devices = [node.meta["val"].device for node in program.placeholders.values()]
    mesh: dict[str, int] = program.info.get("mesh", {})
    ranks = [
        [tensor.to(device) for tensor, device in zip(made, devices, strict=True)]
        for rank in range(prod(mesh.values()))
        for made in [make_inputs(program.inputs, constants, seed, program.info.get("weight_seed"), rank)]
    ]
    with torch.no_grad():
        outputs, *_ = run_ranks(program.graph_module, ranks, mesh or None)
    sums = {spec.name: checksum(spec.name, value, seed) for spec, value in zip(program.outputs, outputs, strict=True)}
    for spec, parts in zip(program.inputs, zip(*ranks, strict=True), strict=True):
        if spec.mutated:
            whole = parts[0] if spec.shared is None else spec.shared.join(parts[:: spec.share_step][: spec.shared.ways])
            sums[spec.source] = checksum(spec.source, whole, seed)
    return sums
