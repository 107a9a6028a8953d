"""The result of one compilation as a document: what ``compile --json`` prints and ``Compiled.report()`` returns."""

from dataclasses import asdict, dataclass, field
from typing import Any


def _list() -> list[dict[str, Any]]:
    return []


def _dict() -> dict[str, Any]:
    return {}


@dataclass
class CompileReport:
    """Keys as in the documentation of ``kimigraph compile --json``; a part that did not run is empty or None."""

    source: str = ""
    phase: str = "decode"
    target: str = ""
    shape_key: str = ""
    graph: dict[str, Any] = field(default_factory=lambda: {"nodes_before": 0, "nodes_after": 0})
    fusions: list[dict[str, Any]] = field(default_factory=_list)
    kernels: list[dict[str, Any]] = field(default_factory=_list)
    launches: dict[str, Any] = field(default_factory=lambda: {"before": 0, "after": 0})
    streams: dict[str, Any] | None = None
    memory: dict[str, Any] | None = None
    quantization: list[dict[str, Any]] = field(default_factory=_list)
    cache: dict[str, Any] = field(default_factory=lambda: {"status": "off", "key": "", "reason": ""})
    timing: dict[str, Any] = field(default_factory=_dict)
    verify: dict[str, Any] | None = None
    numerics: list[dict[str, Any]] = field(default_factory=_list)
    artifact: str | None = None
    dumps: str | None = None
    report: str | None = None
    remarks: list[dict[str, Any]] = field(default_factory=_list)

    def as_dict(self) -> dict[str, Any]:
        """The document as plain JSON values."""
        return asdict(self)
