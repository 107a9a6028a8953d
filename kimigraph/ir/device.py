"""What a device can do, as measured: the one file behind every estimate.

A device file is JSON (``devices/*.json`` beside this module); ``kimigraph measure-device`` writes one on the machine
that it runs on, ``--device-file`` uses one in place of the target's own.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

from kimigraph.ir.config import CompileConfig
from kimigraph.ir.errors import UsageError

SCHEMA = 1
_DIRECTORY = Path(__file__).with_name("devices")
_RATES = ("bytes_per_second", "vector_flops_per_second", "launch_seconds", "units", "cache_bytes")


def _no_text() -> dict[str, str]:
    return {}


@dataclass(frozen=True)
class Device:
    """One device's rates.

    ``bytes_per_second`` is the copy rate, read and written bytes together. ``flops_per_second`` gives the rate of
    matrix products by the type of their operands, ``vector_flops_per_second`` that of everything else.
    ``launch_seconds`` is what an empty kernel takes as a node of a graph, ``latency_seconds`` what a small kernel that
    waits for its predecessor's result takes beyond that, ``event_seconds`` what a wait for another branch of a graph
    takes beyond one within a branch, ``signal_seconds`` what passes until one program of a launch sees what another
    wrote (0: not measured). ``units`` are multiprocessors, ``cache_bytes`` the last-level cache. ``sources``
    says where each figure comes from.
    """

    name: str
    bytes_per_second: float
    flops_per_second: Mapping[str, float]
    vector_flops_per_second: float
    launch_seconds: float
    latency_seconds: float = 0.0
    event_seconds: float = 0.0
    signal_seconds: float = 0.0
    units: int = 1
    cache_bytes: int = 0
    sources: Mapping[str, str] = field(default_factory=_no_text)

    def rate(self, unit: str) -> float:
        """FLOPs per second of products over ``unit`` (a dtype's name), or of ``vector`` work.

        A type without a rate of its own runs at the slowest rate given: an estimate that errs to the safe side.
        """
        if unit == "vector":
            return self.vector_flops_per_second
        found = self.flops_per_second.get(unit)
        return min(self.flops_per_second.values()) if found is None else found

    @property
    def wait_seconds(self) -> float:
        """What programs that wait for others of their launch lose: as much as kernels do, where nobody measured it."""
        return self.signal_seconds or self.latency_seconds

    def text(self) -> str:
        """The device file: ``parse_device`` reads it back."""
        return json.dumps({"schema": SCHEMA, **asdict(self)}, indent=1) + "\n"


@lru_cache(maxsize=8)
def parse_device(text: str) -> Device:
    """The device that a file's text describes; UsageError naming the field that is missing or out of range."""
    try:
        document: Any = json.loads(text)
    except ValueError as error:
        raise UsageError(f"device file: not JSON ({error}); `kimigraph measure-device --out FILE` writes one") from None
    if not isinstance(document, dict) or cast("dict[str, Any]", document).get("schema") != SCHEMA:
        raise UsageError(
            f'device file: want a JSON object with "schema": {SCHEMA}; `kimigraph measure-device --out FILE` writes one'
        )
    fields = {str(key): value for key, value in cast("dict[Any, Any]", document).items() if key != "schema"}
    _check_fields(fields)
    for name in ("units", "cache_bytes"):
        fields[name] = int(fields[name])
    return Device(**fields)


def read_device_file(path: Path) -> str:
    """The text of a device file, checked; UsageError naming the file when it is missing or no such file."""
    try:
        text = path.read_text(encoding="utf-8")
        parse_device(text)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror}); give a device file") from None
    except (UnicodeDecodeError, UsageError) as error:
        raise UsageError(f"{path}: {error}") from None
    return text


def target_device(target: str) -> Device:
    """The measured device that stands for a target: one H200 for CUDA targets, one core for the CPU's."""
    name = "cpu" if target.startswith("cpu") else "h200"
    return parse_device((_DIRECTORY / f"{name}.json").read_text(encoding="utf-8"))


def device_for(config: CompileConfig) -> Device:
    """The device that a compilation is priced for: ``config.device`` (a device file's text), else the target's.

    Nothing of it comes from the machine that compiles, so that decisions are the same everywhere.
    """
    return target_device(config.target) if config.device is None else parse_device(config.device)


def _check_fields(fields: dict[str, Any]) -> None:
    known = set(Device.__dataclass_fields__)
    unknown = sorted(set(fields) - known)
    if unknown:
        raise UsageError(f"device file: {unknown[0]!r} is no field of it; it has {', '.join(sorted(known))}")
    if not isinstance(fields.get("name"), str):
        raise UsageError("device file: name is missing or no text")
    for name in _RATES:
        _positive(name, fields.get(name))
    for name in ("latency_seconds", "event_seconds", "signal_seconds"):
        _positive(name, fields.get(name, 0.0), least=0.0)
    rates: Any = fields.get("flops_per_second")
    if not isinstance(rates, dict) or not rates:
        raise UsageError('device file: flops_per_second is missing; want {"bfloat16": FLOP/s, "float32": FLOP/s, ...}')
    for name, value in cast("dict[Any, Any]", rates).items():
        _positive(f"flops_per_second.{name}", value)


def _positive(name: str, value: Any, least: float | None = None) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not number or (value < least if least is not None else value <= 0):
        raise UsageError(
            f"device file: {name} is {value!r}; want a number {'of at least 0' if least == 0 else 'above 0'}"
        )
