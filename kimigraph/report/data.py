"""What a report shows, read from the compile document and the files of a dump directory and an artifact."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kimigraph.report.hunks import Difference, read_difference

DIFFERENCES = 3_000_000
"""Characters that the differences of all passes together may take; what does not fit stays in the dumps."""


@dataclass(frozen=True)
class PassView:
    """One pass that ran (or the capture, index 0): its times and counts, and what it changed."""

    index: int
    name: str
    text: str
    nodes: int | None
    seconds: float | None
    statistics: dict[str, int]
    difference: Difference | None
    failure: str = ""


@dataclass(frozen=True)
class ReportData:
    """The compile document (the ``--json`` form), the passes, and the text of each kernel file by its path."""

    document: dict[str, Any]
    passes: tuple[PassView, ...]
    kernels: dict[str, str]


def read_data(document: dict[str, Any], dumps: Path | None, artifact: Path | None) -> ReportData:
    """Gather what there is: without dumps no passes, without an artifact no kernel source."""
    passes = _passes(dumps) if dumps is not None else ()
    files = dict.fromkeys(str(kernel.get("file", "")) for kernel in document.get("kernels", []))
    kernels = {name: text for name in files if (text := _read(artifact, name))} if artifact is not None else {}
    return ReportData(document, passes, kernels)


def _passes(dumps: Path) -> tuple[PassView, ...]:
    try:
        entries: list[dict[str, Any]] = json.loads(_read(dumps, "timings.json") or "{}").get("passes", [])
    except ValueError:
        entries = []
    views: list[PassView] = []
    room = DIFFERENCES
    for entry in entries:
        index, text = int(entry["index"]), str(entry["pass"])
        name = re.split(r"[{\s]", text, maxsplit=1)[0]
        found = _read(dumps, f"{index:03d}-{name}.diff")
        difference = read_difference(found).within(room) if found else None
        room -= len(difference.text()) if difference is not None else 0
        views.append(
            PassView(
                index,
                name,
                text,
                entry.get("nodes"),
                entry.get("seconds"),
                dict(entry.get("statistics", {})),
                difference,
                str(entry.get("failed", "")),
            )
        )
    return tuple(views)


def _read(directory: Path | None, name: str) -> str:
    """The text of a file; none where there is no such file, or it is a model and no text."""
    path = directory / name if directory is not None and name and not name.endswith(".onnx") else None
    return path.read_text(encoding="utf-8") if path is not None and path.is_file() else ""
