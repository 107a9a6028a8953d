"""What identifies a compilation: the components of the two cache keys."""

import hashlib
import os
import platform
import sys
import uuid
from collections.abc import Iterator
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import kimigraph
from kimigraph.codegen.support.cubins import ABI
from kimigraph.ir.config import CompileConfig
from kimigraph.ir.printer import print_program
from kimigraph.ir.program import CapturedProgram
from kimigraph.passes import Pipeline
from kimigraph.runtime.cache import digest

KEY_SCHEMA = 2
SETTLED = tuple("target phase batch tokens context overrides marks passes disabled_passes stop_after".split())
"""Options that the graph's text and ``info``, the pipeline's text or the target hold once there is a graph key."""


@lru_cache(maxsize=1)
def compiler_hash() -> dict[str, str]:
    """SHA-256 over the compiler's own files, by room: a change to any pass, template or helper is another key."""
    return tree_hash(Path(kimigraph.__file__).parent)


def tree_hash(root: Path) -> dict[str, str]:
    """SHA-256 over names and contents of the files below ``root``, for each folder in it and for the files beside them.

    Links to folders are followed, byte code is left out.
    """
    rooms: dict[str, Any] = {}
    for relative in sorted(_files(root)):
        folder, slash, _ = relative.partition("/")
        content = hashlib.sha256((root / relative).read_bytes()).digest()
        rooms.setdefault(folder if slash else "top", hashlib.sha256()).update(relative.encode() + b"\0" + content)
    return {name: text.hexdigest() for name, text in sorted(rooms.items())}


def _files(root: Path) -> Iterator[str]:
    for folder, folders, names in os.walk(root, followlinks=True):  # in a checkout three rooms are links
        folders[:] = [name for name in folders if name != "__pycache__"]
        for name in names:
            if not name.startswith(".") and not name.endswith(".pyc"):
                yield (Path(folder) / name).relative_to(root).as_posix()


def toolchain(target: str) -> dict[str, Any]:
    """The versions that a program of that target depends on.

    One with cubins depends on the contract of its launcher alone: other versions of torch and Triton run it as well.
    """
    if is_ahead_of_time(target):
        return {"abi": ABI}
    versions: dict[str, Any] = {"torch": torch.__version__, "python": ".".join(platform.python_version_tuple()[:2])}
    if target != "cpu:reference":
        try:
            versions["triton"] = version("triton")
        except PackageNotFoundError:
            versions["triton"] = "absent"
    return versions


def device_components(target: str) -> dict[str, Any]:
    """What a program of that target depends on in the device: its architecture, and where tiles are chosen by it, its
    size. A target of another kind has no device."""
    if is_ahead_of_time(target):
        return {"arch": target.partition(":")[2]}
    if target != "cuda":
        return {}
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {"arch": f"sm_{properties.major}{properties.minor}", "multiprocessors": properties.multi_processor_count}


def is_ahead_of_time(target: str) -> bool:
    """Whether programs of that target hold cubins."""
    return target.startswith("cuda:")


def pipeline_components(pipeline: Pipeline) -> dict[str, Any]:
    """The text of a pipeline, and the sources of the passes in it that are not this compiler's."""
    foreign = {type(item).__module__ for item in pipeline}
    foreign = {name for name in foreign if not name.startswith("kimigraph.")}
    return {"text": str(pipeline), "sources": {name: _module_hash(name) for name in sorted(foreign)}}


def _module_hash(name: str) -> str:
    """SHA-256 of a module's file; a module without one is equal to nothing, so that it is never a hit."""
    path = getattr(sys.modules.get(name), "__file__", None)
    if path is None or not Path(path).is_file():
        return f"without a file: {uuid.uuid4().hex}"
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def front_components(
    model: dict[str, Any], config: CompileConfig, pipeline: Pipeline, target: str, shape: str
) -> dict[str, Any]:
    """What was asked: the model's identity, the options, the shape, the compiler, its toolchain and the device.

    Where cubins make a program independent of torch's version, so is the key.
    """
    if is_ahead_of_time(target):
        model = {**model, "sources": {name: text for name, text in model["sources"].items() if name != "torch"}}
    return {
        "schema": KEY_SCHEMA,
        "model": model,
        "flags": {**config.key_fields(), "target": target},
        "pipeline": pipeline_components(pipeline),
        "shape": shape,
        "compiler": compiler_hash(),
        "toolchain": toolchain(target),
        "device": device_components(target),
    }


def graph_components(
    captured: CapturedProgram, config: CompileConfig, pipeline: Pipeline, target: str, text: str = ""
) -> dict[str, Any]:
    """What is built: the captured graph as text with its interface, what is done to it, and with which tools.

    The text (``print_program``, which is taken where it is not given) holds the values of constants. The name that a
    model's source goes by is no part of it.
    """
    interface = {
        "outputs": [[spec.name, spec.source] for spec in captured.outputs],
        "trees": [str(captured.in_spec), str(captured.out_spec)],
        "info": {name: value for name, value in captured.info.items() if name != "source"},
    }
    return {
        "schema": KEY_SCHEMA,
        "graph": hashlib.sha256((text or print_program(captured)).encode()).hexdigest(),
        "interface": digest(interface),
        "shapes": shape_components(captured),
        "pipeline": pipeline_components(pipeline),
        "flags": {name: value for name, value in config.key_fields().items() if name not in SETTLED},
        "target": target,
        "compiler": compiler_hash(),
        "toolchain": toolchain(target),
        "device": device_components(target),
    }


def shape_components(captured: CapturedProgram) -> dict[str, Any]:
    """The shape key: phase, sizes of the step, and each caller's tensor by dtype, shape, strides and descriptor.

    Static, all of it: a program serves one shape, and every length up to the capacity of its caches, as lengths are
    data on the device.
    """
    names = ("phase", "batch", "tokens", "context")
    tensors = {
        spec.source: " ".join(
            filter(None, (spec.dtype, str(list(spec.shape)), str(list(spec.stride)), spec.descriptor))
        )
        for spec in captured.inputs
        if not spec.bound
    }
    return {**{name: captured.info[name] for name in names if name in captured.info}, "tensors": tensors}
