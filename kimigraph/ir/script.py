"""What a printed program does when it runs as a script: seeded tensors, one step, a checksum per result."""

import argparse
import base64
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from kimigraph.ir.cache_formats import pack, unpack
from kimigraph.ir.descriptors import parse_descriptor
from kimigraph.ir.program import BLOCK_TABLE, InputSpec
from kimigraph.ir.ranks import join, leave, whole_of
from kimigraph.ir.seeded import checksum, seeded_tensor
from kimigraph.ir.tensor_file import read_tensors

import_module("kimigraph.ir.own_rows")  # registers what graphs of several ranks call


def main(
    step: Callable[..., tuple[Any, ...]],
    inputs: Sequence[InputSpec],
    outputs: Sequence[str],
    constants: Mapping[str, torch.Tensor],
    arguments: Sequence[str] | None = None,
    mesh: Mapping[str, int] | None = None,
) -> None:
    """Read the command line, run ``step`` once and print ``<name> <sum> <magnitudes> <dot>`` lines.

    Outputs go by their names, updated inputs by their source names, and of several ranks (under torchrun) the first
    prints them, with shared ones gathered; a quantised cache starts as the captured caches
    that it holds would, put through the quantiser, and is printed as they are. Exits with a message when ``--weights``
    names a directory that lacks a weight or holds one of another shape.
    """
    parser = argparse.ArgumentParser(description="run one step on seeded tensors and print checksums")
    parser.add_argument("--weights", type=Path, help="directory whose *.safetensors hold the weights")
    parser.add_argument("--seed", type=int, default=0, help="seed of the tensors (default: 0)")
    options = parser.parse_args(arguments)
    rank = join(mesh, "cpu") if mesh else 0
    tensors = make_inputs(inputs, constants, options.seed, rank=rank)
    tensors = [seeded_cache(spec, options.seed) if spec.parts else t for spec, t in zip(inputs, tensors, strict=True)]
    if options.weights:
        bind_weights(options.weights, inputs, tensors, rank)
    results = step(*tensors)
    found = {name: value for name, value in zip(outputs, results, strict=True) if isinstance(value, torch.Tensor)}
    for spec, value in zip(inputs, tensors, strict=True):
        if spec.mutated:
            whole = (
                value if spec.shared is None else spec.shared.join(whole_of(value, spec.shared.ways, spec.share_step))
            )
            found |= unpack(spec, whole) if spec.parts else {spec.source: whole}
    for name, value in found.items() if rank == 0 else ():
        print(name, *map(repr, checksum(name, value, options.seed)))
    leave()


def make_inputs(
    inputs: Sequence[InputSpec],
    constants: Mapping[str, torch.Tensor],
    seed: int,
    weight_seed: int | None = None,
    rank: int = 0,
) -> list[torch.Tensor]:
    """A tensor for every input, in order and in its strides: constants as they are, the others seeded by source.

    ``weight_seed`` is the seed of the weights where it is not ``seed``. ``rank`` has its parts of what is shared out.
    """
    tensors: list[torch.Tensor] = []
    for spec in inputs:
        own = weight_seed if spec.kind == "weight" and weight_seed is not None else seed
        values = constants[spec.source].clone() if spec.kind == "constant" else seeded_input(spec, own, rank)
        tensors.append(with_strides(values, spec.stride))
    return tensors


def seeded_input(spec: InputSpec, seed: int, rank: int = 0) -> torch.Tensor:
    """The seeded tensor of one input, or the part of it that ``rank`` has.

    Rows of a block table have pages of their own, as far as there are pages.
    """
    if spec.source == BLOCK_TABLE and spec.value_range is not None:
        first, beyond = spec.value_range
        pages = torch.arange(torch.Size(spec.shape).numel()) % (beyond - first) + first
        return pages.reshape(spec.shape).to(getattr(torch, spec.dtype))
    dtype = getattr(torch, spec.dtype)
    values = seeded_tensor(spec.source, spec.whole_shape, dtype, spec.kind, seed, spec.value_range)
    return spec.taken(values, rank)


def seeded_cache(spec: InputSpec, seed: int) -> torch.Tensor:
    """The quantised cache that holds the seeded captured ones."""
    form = parse_descriptor(spec.descriptor)
    widths = (getattr(form, "width", 0), getattr(form, "rope_dim", 0))
    values = {
        source: seeded_tensor(source, (*spec.shape[:2], width), getattr(torch, dtype), "cache", seed)
        for (source, dtype), width in zip(spec.parts, widths, strict=False)
    }
    return pack(spec, values)


def with_strides(values: torch.Tensor, stride: Sequence[int]) -> torch.Tensor:
    """The same values laid out with ``stride``; as they are where elements would share memory."""
    reach = 1
    for step, size in sorted((step, size) for size, step in zip(values.shape, stride, strict=True) if size > 1):
        if step < reach:
            return values
        reach = step * size
    return torch.empty_strided(values.shape, stride, dtype=values.dtype).copy_(values)


def bind_weights(directory: Path, inputs: Sequence[InputSpec], tensors: Sequence[torch.Tensor], rank: int = 0) -> None:
    """Overwrite weights and buffers with those of ``directory/*.safetensors``, found by source name."""
    wanted = {spec.source: tensor for spec, tensor in zip(inputs, tensors, strict=True) if spec.bound}
    specs = {spec.source: spec for spec in inputs}
    missing = {spec.source for spec in inputs if spec.kind == "weight"}
    for path in sorted(directory.glob("*.safetensors")):
        for name, value in read_tensors(path, wanted.keys()):
            value = specs[name].taken(value, rank)
            if value.shape != wanted[name].shape:
                raise SystemExit(f"{path}: {name} is {list(value.shape)}, the program wants {list(wanted[name].shape)}")
            wanted[name].copy_(value)
            missing.discard(name)
    if missing:
        raise SystemExit(f"{directory}: {len(missing)} weights of the program are missing, {min(missing)} among them")


def constant(text: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """The tensor whose bytes ``text`` holds in base 64."""
    data = bytearray(base64.b64decode(text))
    flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
    return flat.reshape(list(shape))
