"""The untouched eager model, run in a process of its own: what a program is verified against.

``python -m kimigraph.capture.eager SOURCE --config JSON --out FILE [--length N --out FILE]...`` loads SOURCE without
marks or export, runs one step at each length, and writes results and changed arguments as safetensors.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils import _pytree as pytree

import kimigraph
from kimigraph.capture.load import load_source
from kimigraph.capture.signature import call_leaves, result_leaves, unique
from kimigraph.capture.source import ModelSource
from kimigraph.ir.config import CompileConfig
from kimigraph.ir.env import compiler_environment
from kimigraph.ir.errors import CaptureError, KimigraphError

_OUTPUT, _INPUT = "output:", "input:"


@dataclass(frozen=True)
class EagerStep:
    """One eager step: its results by ``OutputSpec.source``, and the arguments it changed by ``InputSpec.source``."""

    outputs: dict[str, Tensor]
    inputs: dict[str, Tensor]


def eager_step(source: ModelSource, length: int | None = None) -> EagerStep:
    """Run one step of ``source`` in this process, ``length`` tokens into the sequences (None: its default).

    Buffers that the step changes are among its ``inputs``; the module keeps the values that it had.
    """
    module, args, kwargs = source.build(length)
    buffers = {name.removeprefix(source.hints.prefix): buffer for name, buffer in module.named_buffers()}
    kept = {name: buffer.clone() for name, buffer in buffers.items()}
    leaves = [leaf for leaf in call_leaves(module, args, kwargs) if isinstance(leaf.value, Tensor)]
    before = [leaf.value.clone() for leaf in leaves]
    with torch.no_grad():
        values, spec = pytree.tree_flatten(module(*args, **kwargs))
    named = [
        (name, value) for name, value in zip(result_leaves(spec), values, strict=True) if isinstance(value, Tensor)
    ]
    if len(source.hints.outputs) == len(named):
        named = [(name, value) for name, (_, value) in zip(source.hints.outputs, named, strict=True)]
    names = unique(leaf.name for leaf in leaves)
    changed = {
        name: leaf.value for name, leaf, old in zip(names, leaves, before, strict=True) if _differs(leaf.value, old)
    }
    for name, buffer in buffers.items():
        if _differs(buffer, kept[name]):
            changed[name] = buffer.clone()
            buffer.copy_(kept[name])
    return EagerStep(dict(named), changed)


def _differs(tensor: Tensor, old: Tensor) -> bool:
    return not torch.equal(tensor.nan_to_num(), old.nan_to_num())


def eager_steps(source: str, config: CompileConfig, lengths: Sequence[int | None] = (None,)) -> list[EagerStep]:
    """One eager step of SOURCE at each length, all run in one process of its own.

    Raises CaptureError with that process' complaint when it fails.
    """
    with tempfile.TemporaryDirectory(prefix="kimigraph-eager-") as scratch:
        files = [Path(scratch) / f"{index}.safetensors" for index in range(len(lengths))]
        command = [sys.executable, "-m", __name__, source, "--config", json.dumps(asdict(config))]
        for length, path in zip(lengths, files, strict=True):
            command += ["--length", "default" if length is None else str(length), "--out", str(path)]
        ran = subprocess.run(command, capture_output=True, text=True, env=_environment(), check=False)
        if ran.returncode:
            complaint = (ran.stderr.strip().splitlines() or ["no message"])[-1]
            raise CaptureError(f"the eager model of {source} failed in its own process: {complaint}")
        return [read_step(path) for path in files]


def read_step(path: Path) -> EagerStep:
    """The step that this module wrote to ``path``."""
    tensors = load_file(path)
    return EagerStep(
        {name.removeprefix(_OUTPUT): value for name, value in tensors.items() if name.startswith(_OUTPUT)},
        {name.removeprefix(_INPUT): value for name, value in tensors.items() if name.startswith(_INPUT)},
    )


def write_step(step: EagerStep, path: Path) -> None:
    """Write a step for ``read_step``."""
    tensors = {_OUTPUT + name: value for name, value in step.outputs.items()}
    tensors |= {_INPUT + name: value for name, value in step.inputs.items()}
    save_file(
        {name: value.detach().clone(memory_format=torch.contiguous_format) for name, value in tensors.items()}, path
    )


def _environment() -> dict[str, str]:
    """The eager process finds this package where this process did, and runs no interpreter."""
    environment = compiler_environment()
    root = str(Path(kimigraph.__file__).parent.parent)
    inherited = environment.get("PYTHONPATH", "")
    return {**environment, "PYTHONPATH": root + os.pathsep + inherited if inherited else root}


def _config(text: str) -> CompileConfig:
    fields: dict[str, Any] = json.loads(text)
    for name in ("disabled_passes", "required_fusions"):
        fields[name] = tuple(fields.get(name, ()))
    fields["overrides"] = tuple((name, value) for name, value in fields.get("overrides", ()))
    return CompileConfig(**fields)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the eager steps that the command line asks for; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m kimigraph.capture.eager", description=__doc__)
    parser.add_argument("source")
    parser.add_argument("--config", type=_config, default=CompileConfig(), help="fields of CompileConfig as JSON")
    parser.add_argument("--length", action="append", default=[], help="tokens before the step, or 'default'")
    parser.add_argument("--out", action="append", type=Path, required=True, help="file to write, one for each length")
    asked = parser.parse_args(arguments)
    lengths = [None if text == "default" else int(text) for text in asked.length] or [None]
    if len(lengths) != len(asked.out):
        parser.error(f"{len(lengths)} lengths but {len(asked.out)} files: give one --out for each --length")
    try:
        source = load_source(asked.source, asked.config)
        for length, path in zip(lengths, asked.out, strict=True):
            write_step(eager_step(source, length), path)
    except KimigraphError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
