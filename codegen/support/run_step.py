"""One step of a program on seeded tensors, and its checksums: what ``program.py`` does when it runs as a script.

An artifact carries this file's text as ``support/run_step.py``, so it imports torch and the standard library alone.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

EXIT_DIFFERENT = 3
Shares = dict[str, tuple[list[int], int]]
"""Of what ranks share out, the fields of its share and how many neighbouring ranks have the same part, by source."""


def main(
    here: Path, device: torch.device, step: Callable[..., tuple[Any, ...]], load: Callable[[str], ModuleType]
) -> None:
    """Read the command line and ``manifest.json``, run ``step`` once, print ``<name> <sum> <magnitudes> <dot>``."""
    parser = argparse.ArgumentParser(description="run one step on seeded tensors and print checksums")
    parser.add_argument("--weights", type=Path, help="directory whose *.safetensors hold the weights")
    parser.add_argument("--seed", type=int, help="seed of the tensors (default: that of manifest.json)")
    parser.add_argument("--check", action="store_true", help="compare with the checksums of manifest.json")
    options = parser.parse_args()
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SystemExit(f"{here} was compiled for cuda, and torch finds no CUDA device: run it where there is one")
    manifest = json.loads((here / "manifest.json").read_bytes())
    seed = manifest["seed"] if options.seed is None else options.seed
    seeded, files = load("support/seeded.py"), load("support/tensor_file.py")
    weight_seed = manifest["info"].get("weight_seed") if options.seed is None else None
    inputs, made = manifest["inputs"], manifest["preparation"]
    mesh = manifest["info"].get("mesh", {})
    ways = prod(mesh.values())
    rank = load("support/ranks.py").join(mesh, device.type) if ways > 1 else 0
    own = [record for record in inputs if record["source"] not in made] + manifest["sources"]
    shares = {record["source"]: (record["share"], record["share_step"]) for record in own if record.get("share")}
    make = seeded.seeded_tensor if ways == 1 else parts_of(shares, load("support/shares.py"), seeded, rank)
    tensors = make_tensors(own, seed, make, weight_seed)
    replace_tensors(tensors, constants_of(here, inputs, files))
    if options.weights:
        given = weights_of(options.weights, own, tensors, files)
        replace_tensors(tensors, given if ways == 1 else taken(given, shares, load("support/shares.py"), rank))
    prepare = load("support/preparation.py").prepare
    tensors |= {name: prepare(steps, tensors) for name, steps in made.items()}
    arguments = [tensors[record["source"]].to(device) for record in inputs]
    outputs = step(*arguments)
    if ways > 1:
        arguments = gathered(arguments, inputs, load("support/shares.py"), load("support/ranks.py"))
    sums = dict(checksums(manifest, arguments, outputs, seed, seeded.checksum))
    for name, (total, magnitudes, dot) in sums.items() if rank == 0 else ():
        print(name, repr(total), repr(magnitudes), repr(dot))
    if ways > 1:
        load("support/ranks.py").leave()
    if options.check:
        sys.exit(compare(sums, manifest, seeded.same_checksum))


def make_tensors(
    inputs: list[dict[str, Any]], seed: int, seeded: Callable[..., torch.Tensor], weight_seed: int | None = None
) -> dict[str, torch.Tensor]:
    """A seeded tensor for every input, by source name, in the strides that the graph was made for.

    ``weight_seed`` is the seed of the weights where it is not ``seed``.
    """
    tensors: dict[str, torch.Tensor] = {}
    for record in inputs:
        dtype = getattr(torch, record["dtype"])
        own = weight_seed if record["kind"] == "weight" and weight_seed is not None else seed
        values = seeded(record["source"], record["shape"], dtype, record["kind"], own, record["value_range"])
        tensors[record["source"]] = with_strides(values, record["stride"])
    return tensors


def parts_of(shares: Shares, share: ModuleType, seeded: ModuleType, rank: int) -> Callable[..., torch.Tensor]:
    """What makes the seeded tensors of one rank: its parts of the whole ones."""

    def make(source: str, shape: list[int], *rest: Any) -> torch.Tensor:
        if source not in shares:
            return seeded.seeded_tensor(source, shape, *rest)
        fields, step = shares[source]
        part = share.Share(*fields)
        return part.take(seeded.seeded_tensor(source, part.whole(shape), *rest), rank // step % part.ways)

    return make


def taken(
    given: Iterator[tuple[str, torch.Tensor]], shares: Shares, share: ModuleType, rank: int
) -> Iterator[tuple[str, torch.Tensor]]:
    """Of whole tensors what one rank has."""
    for name, value in given:
        if name in shares:
            part, step = share.Share(*shares[name][0]), shares[name][1]
            value = part.take(value, rank // step % part.ways)
        yield name, value


def gathered(
    arguments: list[torch.Tensor], inputs: list[dict[str, Any]], share: ModuleType, ranks: ModuleType
) -> list[torch.Tensor]:
    """The arguments with those that the step updates whole."""
    found: list[torch.Tensor] = []
    for record, value in zip(inputs, arguments, strict=True):
        if record["mutated"] and record.get("share"):
            part = share.Share(*record["share"])
            value = part.join(ranks.whole_of(value, part.ways, record["share_step"]))
        found.append(value)
    return found


def with_strides(values: torch.Tensor, stride: list[int]) -> torch.Tensor:
    """The same values laid out with ``stride``; as they are where elements would share memory."""
    sized = sorted((step, size) for size, step in zip(values.shape, stride, strict=True) if size > 1)
    reach = 1
    for step, size in sized:
        if step < reach:
            return values
        reach = step * size
    return torch.empty_strided(values.shape, stride, dtype=values.dtype).copy_(values)


def replace_tensors(tensors: dict[str, torch.Tensor], given: Iterator[tuple[str, torch.Tensor]]) -> None:
    """Put ``given`` values in the place of seeded ones; a shape that differs is an error naming the tensor."""
    for name, value in given:
        wanted = tensors.get(name)
        if wanted is None:
            continue
        if value.shape != wanted.shape:
            raise SystemExit(f"{name}: the program wants shape {list(wanted.shape)}, the file has {list(value.shape)}")
        wanted.copy_(value)


def constants_of(here: Path, inputs: list[dict[str, Any]], files: ModuleType) -> Iterator[tuple[str, torch.Tensor]]:
    """Source name and value of the inputs that are constants; constants.bin has them by placeholder."""
    sources = {record["name"]: record["source"] for record in inputs if record["kind"] == "constant"}
    if sources:
        for name, value in files.read_tensors(here / "constants.bin", sources.keys()):
            yield sources[name], value


def weights_of(
    directory: Path, inputs: list[dict[str, Any]], tensors: dict[str, torch.Tensor], files: ModuleType
) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights of a directory; every weight of the program must be there."""
    missing = {record["source"] for record in inputs if record["kind"] == "weight"}
    paths = sorted(directory.glob("*.safetensors"))
    if not paths:
        raise SystemExit(f"{directory} holds no *.safetensors files")
    for path in paths:
        for name, value in files.read_tensors(path, tensors.keys()):
            missing.discard(name)
            yield name, value
    if missing:
        raise SystemExit(f"{directory} lacks {len(missing)} weights of the program, {min(missing)} among them")


def checksums(
    manifest: dict[str, Any],
    arguments: list[torch.Tensor],
    outputs: tuple[Any, ...],
    seed: int,
    checksum: Callable[..., list[float]],
) -> Iterator[tuple[str, list[float]]]:
    """Name and checksum of every output, then of every input that the step updated."""
    for record, value in zip(manifest["outputs"], outputs, strict=True):
        if isinstance(value, torch.Tensor):
            yield record["name"], checksum(record["name"], value, seed)
    for record, value in zip(manifest["inputs"], arguments, strict=True):
        if record["mutated"]:
            yield record["source"], checksum(record["source"], value, seed)


def compare(sums: dict[str, list[float]], manifest: dict[str, Any], same: Callable[..., bool]) -> int:
    """Exit status: 0 when every checksum is the recorded one within the tolerance; differences go to stderr."""
    if not manifest["checksums"]:
        print("manifest.json holds no checksums to compare with", file=sys.stderr)
        return 1
    status = 0
    for name, wanted in manifest["checksums"].items():
        if not same(sums[name], wanted, manifest["tolerance"]):
            print(f"{name}: got {sums[name]}, manifest.json has {wanted}", file=sys.stderr)
            status = EXIT_DIFFERENT
    return status
