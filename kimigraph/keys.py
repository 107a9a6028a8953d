"""What identifies a compilation: the components of the two cache keys and the shape key."""

import hashlib
import platform
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

import kimigraph
from kimigraph.ir.config import CompileConfig

KEY_SCHEMA = 1


@lru_cache(maxsize=1)
def compiler_hash() -> str:
    """SHA-256 over the compiler's own source files: any change to a pass, template or helper is another key."""
    root = Path(kimigraph.__file__).parent
    text = hashlib.sha256()
    for path in sorted(root.rglob("*.py"), key=lambda item: item.relative_to(root).as_posix()):
        text.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return text.hexdigest()


def toolchain(target: str) -> dict[str, str]:
    """The versions that a program of that target depends on."""
    versions = {"torch": torch.__version__, "python": ".".join(platform.python_version_tuple()[:2])}
    if target != "cpu:reference":
        from importlib.metadata import version

        versions["triton"] = version("triton")
    if target == "cuda":
        versions["device"] = "{}.{}".format(*torch.cuda.get_device_capability())
    return versions


def front_components(model: dict[str, Any], config: CompileConfig, target: str, shape: str) -> dict[str, Any]:
    """What was asked: the model's identity, the options, the shape, the compiler and its toolchain."""
    return {
        "schema": KEY_SCHEMA,
        "model": model,
        "flags": {**config.key_fields(), "target": target},
        "shape": shape,
        "compiler": compiler_hash(),
        "toolchain": toolchain(target),
    }


def graph_components(graph_text: str, pipeline: str, config: CompileConfig, target: str) -> dict[str, Any]:
    """What is built: the captured graph as text, what is done to it, and with which tools."""
    flags = config.key_fields()
    for settled in ("target", "phase", "batch", "tokens", "context", "overrides", "marks", "passes", "disabled_passes"):
        del flags[settled]  # the graph text, the pipeline text or the target already hold it
    return {
        "schema": KEY_SCHEMA,
        "graph": hashlib.sha256(graph_text.encode()).hexdigest(),
        "pipeline": pipeline,
        "flags": flags,
        "target": target,
        "compiler": compiler_hash(),
        "toolchain": toolchain(target),
    }
