"""``kimigraph dumps``: list, show and compare the dumps of a directory that ``--dump-passes`` wrote."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kimigraph.ir.errors import UsageError
from kimigraph.passes.instruments.dump import MARKER, unified_diff

_DUMP = re.compile(r"(\d{3})-(.+)\.(?:py|failed\.txt)")


@dataclass(frozen=True)
class DumpEntry:
    """One dump: number, pass name, file name, whether the pass changed the graph or failed, seconds and node count."""

    index: int
    name: str
    file: str
    modified: bool
    failed: bool
    seconds: float | None
    nodes: int | None


def list_dumps(directory: Path) -> list[DumpEntry]:
    """The dumps of ``directory`` in pass order. Raises UsageError when it holds none."""
    directory = Path(directory)
    if not directory.is_dir():
        raise UsageError(f"{directory} is no directory; name one that --dump-passes wrote.")
    timings = _timings(directory)
    entries: dict[int, DumpEntry] = {}
    for path in sorted(directory.iterdir()):
        match = _DUMP.fullmatch(path.name)
        if match is None or (int(match[1]) in entries and path.suffix != ".txt"):
            continue
        index = int(match[1])
        timing = timings.get(index, {})
        modified = (directory / f"{match[1]}-{match[2]}.diff").is_file()
        failed = path.name.endswith(".failed.txt")
        entries[index] = DumpEntry(
            index, match[2], path.name, modified, failed, timing.get("seconds"), timing.get("nodes")
        )
    if not entries:
        raise UsageError(f"{directory} holds no dumps (no {MARKER}, no 000-capture.py); write some with --dump-passes.")
    return [entries[index] for index in sorted(entries)]


def show_dump(directory: Path, number: int) -> str:
    """The text of dump ``number``; 0 is the capture. Raises UsageError when there is none of that number."""
    return (Path(directory) / _entry(Path(directory), number).file).read_text(encoding="utf-8")


def diff_dumps(directory: Path, number: int, other: int | None = None) -> str:
    """What pass ``number`` changed (against ``number - 1``), or the difference from dump ``number`` to dump ``other``.

    A unified difference; empty when nothing differs. Raises UsageError when a dump is not there.
    """
    if other is None:
        if number == 0:
            raise UsageError("dump 0 is the capture: nothing comes before it. Give two numbers, or one from 1 on.")
        number, other = number - 1, number
    directory = Path(directory)
    first, second = _entry(directory, number), _entry(directory, other)
    texts = show_dump(directory, number), show_dump(directory, other)
    return unified_diff(*texts, Path(first.file).stem, Path(second.file).stem)


def _entry(directory: Path, number: int) -> DumpEntry:
    entries = list_dumps(directory)
    for entry in entries:
        if entry.index == number:
            return entry
    known = ", ".join(f"{entry.index} {entry.name}" for entry in entries)
    raise UsageError(f"{directory} has no dump {number}. It has: {known}.")


def _timings(directory: Path) -> dict[int, dict[str, Any]]:
    path = directory / "timings.json"
    try:
        passes = json.loads(path.read_text(encoding="utf-8"))["passes"] if path.is_file() else []
        return {entry["index"]: entry for entry in passes}
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path} cannot be read ({error}); the dumps are damaged: write them again.") from error
