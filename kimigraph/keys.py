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
from kimigraph.ir.config import CompileConfig
from kimigraph.ir.printer import print_program
from kimigraph.ir.program import CapturedProgram
from kimigraph.passes import Pipeline
from kimigraph.runtime.compile_cache import digest

KEY_SCHEMA = 1
SETTLED = tuple("target phase batch tokens context overrides marks passes disabled_passes stop_after".split())
"""Options that the graph's text and ``info``, the pipeline's text or the target hold once there is a graph key."""


@lru_cache(maxsize=1)
def compiler_hash() -> str:
    """SHA-256 over the compiler's own files: any change to a pass, template, table or helper is another key."""
    return tree_hash(Path(kimigraph.__file__).parent)


def tree_hash(root: Path) -> str:
    """SHA-256 over names and contents of the files below ``root``, links to folders followed, byte code left out."""
    text = hashlib.sha256()
    for relative in sorted(_files(root)):
        text.update(relative.encode() + b"\0" + hashlib.sha256((root / relative).read_bytes()).digest())
    return text.hexdigest()


def _files(root: Path) -> Iterator[str]:
    for folder, folders, names in os.walk(root, followlinks=True):  # in a checkout three rooms are links
        folders[:] = [name for name in folders if name != "__pycache__"]
        for name in names:
            if not name.startswith(".") and not name.endswith(".pyc"):
                yield (Path(folder) / name).relative_to(root).as_posix()


def toolchain(target: str) -> dict[str, str]:
    """The versions that a program of that target depends on."""
    versions = {"torch": torch.__version__, "python": ".".join(platform.python_version_tuple()[:2])}
    if target != "cpu:reference":
        try:
            versions["triton"] = version("triton")
        except PackageNotFoundError:
            versions["triton"] = "absent"
    if target == "cuda":
        versions["device"] = "{}.{}".format(*torch.cuda.get_device_capability())
    return versions


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
    """What was asked: the model's identity, the options, the shape, the compiler and its toolchain."""
    return {
        "schema": KEY_SCHEMA,
        "model": model,
        "flags": {**config.key_fields(), "target": target},
        "pipeline": pipeline_components(pipeline),
        "shape": shape,
        "compiler": compiler_hash(),
        "toolchain": toolchain(target),
    }


def graph_components(
    captured: CapturedProgram, config: CompileConfig, pipeline: Pipeline, target: str
) -> dict[str, Any]:
    """What is built: the captured graph as text with its interface, what is done to it, and with which tools.

    The text holds the values of constants. The name that a model's source goes by is no part of it.
    """
    interface = {
        "outputs": [[spec.name, spec.source] for spec in captured.outputs],
        "trees": [str(captured.in_spec), str(captured.out_spec)],
        "info": {name: value for name, value in captured.info.items() if name != "source"},
    }
    return {
        "schema": KEY_SCHEMA,
        "graph": hashlib.sha256(print_program(captured).encode()).hexdigest(),
        "interface": digest(interface),
        "pipeline": pipeline_components(pipeline),
        "flags": {name: value for name, value in config.key_fields().items() if name not in SETTLED},
        "target": target,
        "compiler": compiler_hash(),
        "toolchain": toolchain(target),
    }
