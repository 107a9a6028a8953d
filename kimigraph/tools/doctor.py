"""``kimigraph doctor``: what is installed here, what works, and which known limits apply."""

import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal

import torch

import kimigraph
from kimigraph.adapters.onnx_model import OLDEST
from kimigraph.ir import env
from kimigraph.runtime.cache import default_root

LEAST = {"torch": (2, 11), "triton": (3, 6), "transformers": (5, 24), **OLDEST}
"""The oldest release of each package that kimigraph works with; the last three are optional."""

PACKAGES = (*LEAST, "numpy", "safetensors", "typer", "rich")
PROBE_SECONDS = 120
STATED_LIMITS = (
    (
        "one process, one way",
        "the interpreter must be on before triton is first imported, and a process that has it on cannot build cubins",
    ),
    ("no inline PTX, no grid barriers", "kernels that need them are launched in parts under the interpreter"),
    ("slow", "a sort of 2048 values takes seconds: the interpreter is for checking, never for timing"),
)


@dataclass(frozen=True)
class Check:
    """One finding: ``works``, ``limit`` (works, with a known difference), ``missing`` (optional) or ``fails``."""

    area: str
    name: str
    status: Literal["works", "limit", "missing", "fails"]
    detail: str = ""


@dataclass(frozen=True)
class Diagnosis:
    """Versions, devices and checks; ``healthy`` when nothing that kimigraph needs fails."""

    versions: dict[str, str]
    devices: list[dict[str, Any]]
    checks: list[Check]

    @property
    def healthy(self) -> bool:
        """Whether models can be compiled here."""
        return all(check.status != "fails" for check in self.checks)

    def as_dict(self) -> dict[str, Any]:
        """The diagnosis as plain JSON values."""
        return {**asdict(self), "healthy": self.healthy}


def diagnose(notify: Callable[[str], None] = lambda message: None) -> Diagnosis:
    """Look at this machine; starts two short processes, for the interpreter and for the compiler excludes it."""
    versions = {"kimigraph": kimigraph.__version__, "python": platform.python_version()}
    versions |= {name: found for name in PACKAGES if (found := _version(name))}
    checks = _packages(versions)
    checks += [Check("targets", "cpu:reference", "works", "plain torch operators"), _cuda()]
    notify("probing the interpreter")
    checks += _interpreter(_probe("interpreter", env.interpreter_environment()))
    notify("probing the compiler")
    checks += _compiler(_probe("compiler", env.compiler_environment()))
    checks.append(_cache())
    return Diagnosis(versions, _devices(), checks)


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _packages(versions: dict[str, str]) -> list[Check]:
    checks: list[Check] = []
    for name, least in LEAST.items():
        found, wanted = versions.get(name, ""), ".".join(map(str, least))
        if not found:
            needed = name in ("torch", "triton")
            extra = {"transformers": "hf", "onnx": "onnx", "onnxruntime": "onnx"}.get(name, "")
            install = f"pip install 'kimigraph[{extra}]'" if extra else f"pip install {name}"
            checks.append(Check("packages", name, "fails" if needed else "missing", install))
        elif _numbers(found) < least:
            checks.append(Check("packages", name, "fails", f"{found} is older than {wanted}: pip install -U {name}"))
        else:
            checks.append(Check("packages", name, "works", found))
    return checks


def _numbers(text: str) -> tuple[int, ...]:
    parts = text.split("+")[0].split(".")[:2]
    return tuple(int("".join(filter(str.isdigit, part)) or 0) for part in parts)


def _cuda() -> Check:
    if torch.cuda.is_available():
        return Check("targets", "cuda", "works", torch.cuda.get_device_name(0))
    why = "this torch is built without CUDA" if torch.version.cuda is None else "no CUDA device is visible"
    return Check("targets", "cuda", "missing", f"{why}; --target cuda:sm_90 builds for one elsewhere")


def _interpreter(found: list[dict[str, Any]] | str) -> list[Check]:
    if isinstance(found, str):
        return [Check("targets", "cpu (interpreter)", "fails", found)]
    checks = [Check("targets", "cpu (interpreter)", "works" if found[0]["ok"] else "fails", found[0]["detail"])]
    for item in found[1:]:
        checks.append(Check("interpreter", item["name"], "works" if item["ok"] else "limit", item["detail"]))
    return [*checks, *(Check("interpreter", name, "limit", detail) for name, detail in STATED_LIMITS)]


def _compiler(found: list[dict[str, Any]] | str) -> list[Check]:
    if isinstance(found, str):
        return [Check("targets", "cuda:sm_90 (cross-compile)", "fails", found)]
    item = found[0]
    return [Check("targets", "cuda:sm_90 (cross-compile)", "works" if item["ok"] else "fails", item["detail"])]


def _probe(kind: str, environment: dict[str, str]) -> list[dict[str, Any]] | str:
    """What the probes found, or why they could not run."""
    command = [sys.executable, "-m", "kimigraph.adapters.triton_probe", kind]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, env=environment, timeout=PROBE_SECONDS, check=False
        )
        return json.loads(done.stdout.strip().splitlines()[-1])
    except subprocess.TimeoutExpired:
        return f"no answer within {PROBE_SECONDS} seconds"
    except (OSError, ValueError, IndexError):
        return f"`{' '.join(command[1:])}` did not run: start it by hand to see why"


def _cache() -> Check:
    root = default_root()
    place = root
    while not place.exists():
        place = place.parent
    if os.access(place, os.W_OK):
        return Check("cache", "compile cache", "works", str(root))
    return Check("cache", "compile cache", "limit", f"{root} is not writable: set KIMIGRAPH_CACHE_DIR")


def _devices() -> list[dict[str, Any]]:
    devices: list[dict[str, Any]] = [{"name": platform.machine(), "kind": "cpu", "cores": os.cpu_count()}]
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        capability = f"sm_{properties.major}{properties.minor}"
        devices.append(
            {"name": properties.name, "kind": "cuda", "capability": capability, "bytes": properties.total_memory}
        )
    return devices
