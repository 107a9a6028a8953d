"""``--dump-passes``: the program after every pass as a script, with differences, remarks, times and a picture."""

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kimigraph.ir.device import Device, target_device
from kimigraph.ir.errors import UsageError
from kimigraph.ir.known_lines import KnownLines
from kimigraph.ir.memory_plan import print_map
from kimigraph.ir.printer import print_program
from kimigraph.ir.program import CapturedProgram
from kimigraph.ir.remarks import PassResult
from kimigraph.ir.trace import FILE as SCHEDULE
from kimigraph.ir.trace import timeline_text
from kimigraph.passes.base import Pass
from kimigraph.passes.instruments import difference
from kimigraph.passes.instruments.base import Instrument
from kimigraph.passes.instruments.dot import graph_to_dot
from kimigraph.passes.instruments.reproducer import REPRODUCER, print_failure
from kimigraph.passes.options import print_pass
from kimigraph.passes.pipeline import Pipeline
from kimigraph.passes.scheduling.planned import planned_track

MARKER = ".kimigraph-dumps.json"
_OWN_NAME = re.compile(
    r"\d{3}-[a-z0-9-]+\.(py|diff|failed\.txt)|remarks\.jsonl|timings\.json|graph\.dot|schedule\.json|report\.html|memory\.txt|reproducer\.py"
)


class DumpDirectory:
    """A directory that holds dumps and nothing else; a marker file lists what was written into it."""

    def __init__(self, path: Path, *, keep: bool = False) -> None:
        """Claim ``path``: made when missing; dumps of an earlier run in it are removed, unless ``keep``.

        Raises UsageError, and touches nothing, when it is a file or holds anything that no earlier run wrote.
        """
        self.path = path
        if path.exists() and not path.is_dir():
            raise UsageError(f"--dump-passes {path}: that is a file; name a directory, new, empty or with dumps.")
        path.mkdir(parents=True, exist_ok=True)
        own = self._listed()
        foreign = sorted(item.name for item in path.iterdir() if item.name not in own and item.name != MARKER)
        if foreign:
            shown = ", ".join(foreign[:3]) + (", ..." if len(foreign) > 3 else "")
            raise UsageError(
                f"--dump-passes {path}: the directory holds files that are no dumps of kimigraph ({shown}); "
                "name one that is new, empty or holds dumps."
            )
        for name in () if keep else own:
            (path / name).unlink(missing_ok=True)
        self._written = sorted(own) if keep else []
        self._mark()

    def write(self, name: str, text: str) -> None:
        """Write one file, replacing its earlier content."""
        if name not in self._written:
            self._written.append(name)
            self._mark()
        (self.path / name).write_text(text, encoding="utf-8")

    def append(self, name: str, text: str) -> None:
        """Add to one file and flush it."""
        if name not in self._written:
            return self.write(name, text)
        with (self.path / name).open("a", encoding="utf-8") as file:
            file.write(text)

    def _listed(self) -> set[str]:
        marker = self.path / MARKER
        try:
            listed: Any = json.loads(marker.read_text(encoding="utf-8"))["files"] if marker.is_file() else []
            return {name for name in listed if isinstance(name, str) and _OWN_NAME.fullmatch(name)}
        except (ValueError, KeyError, TypeError):
            return set()

    def _mark(self) -> None:
        (self.path / MARKER).write_text(json.dumps({"files": self._written}, indent=1) + "\n", encoding="utf-8")


@dataclass
class DumpPasses(Instrument):
    """Writes ``000-capture.py``, ``NNN-<pass>.py``, ``.diff``, ``remarks.jsonl``, ``timings.json``, ``graph.dot``.

    Every file is complete after each pass, so a crash leaves the dumps up to it, with ``NNN-<pass>.failed.txt`` for the
    pass that raised and ``reproducer.py``, which runs it again. ``graph.dot`` comes at the end or with the failure,
    ``schedule.json`` after the last pass, planned by the cost model of ``device``. ``captured`` is the text of the
    capture (``print_program``) where it is at hand. ``UsageError``, before anything runs, when the directory holds
    other people's files.
    """

    directory: Path
    device: Device = field(default_factory=lambda: target_device("cuda"))
    captured: str = ""
    _known: KnownLines = field(init=False, default_factory=KnownLines, repr=False)
    _passes: int = field(init=False, default=0, repr=False)
    _files: DumpDirectory = field(init=False, repr=False)
    _before: str = field(init=False, default="", repr=False)
    _last: str = field(init=False, default="", repr=False)
    _stem: str = field(init=False, default="000-capture", repr=False)
    _timings: list[dict[str, Any]] = field(init=False, default_factory=lambda: [], repr=False)

    def __post_init__(self) -> None:
        self._files = DumpDirectory(Path(self.directory))

    def before_pipeline(self, program: CapturedProgram, pipeline: Pipeline) -> None:
        """Write the capture."""
        self._stem, self._passes = "000-capture", len(pipeline)
        self._known = KnownLines()
        self._last = retitled(self.captured or print_program(program), self._stem)
        self._files.write("000-capture.py", self._last)
        self._files.write("remarks.jsonl", "")
        self._timings = [{"index": 0, "pass": "capture", "nodes": _size(program)}]
        self._write_timings()
        if not self._passes:
            self._write_schedule(program)

    def after_pass(self, index: int, item: Pass, program: CapturedProgram, result: PassResult, seconds: float) -> None:
        """Write the program and what changed."""
        stem = f"{index:03d}-{item.name}"
        text = print_program(program, stem, known=self._known) if result.modified else retitled(self._last, stem)
        self._files.write(f"{stem}.py", text)
        difference = unified_diff(self._last, text, self._stem, stem) if result.modified else ""
        if difference:
            self._files.write(f"{stem}.diff", difference)
        self._before, self._last, self._stem = self._last, text, stem
        if item.name == "plan-memory":
            self._files.write("memory.txt", print_map(program.graph_module.graph))
        if index == self._passes:
            self._write_schedule(program)
        lines = [json.dumps({"index": index, **remark.as_dict()}) + "\n" for remark in result.remarks]
        self._files.append("remarks.jsonl", "".join(lines))
        entry = {"index": index, "pass": print_pass(item), "seconds": seconds, "modified": result.modified}
        self._timings.append({**entry, "nodes": _size(program), "statistics": result.statistics})
        self._write_timings()

    def after_pipeline(self, program: CapturedProgram) -> None:
        """Write the picture."""
        self._files.write("graph.dot", graph_to_dot(program.graph_module.graph))

    def pass_failed(self, index: int, item: Pass, program: CapturedProgram, error: Exception) -> None:
        """Write the error with the graph as it is, and the reproducer with the graph as it was."""
        dumped = self._stem == f"{index:03d}-{item.name}"  # a watcher behind this one refused what the pass left
        self._files.write(REPRODUCER, print_failure(self._before if dumped else self._last, item, error))
        text = f"{type(error).__name__}: {error}\n\nThe graph as the failure left it:\n\n{program.graph_module.graph}\n"
        self._files.write(f"{index:03d}-{item.name}.failed.txt", text)
        self._timings.append({"index": index, "pass": print_pass(item), "failed": f"{type(error).__name__}: {error}"})
        self._write_timings()
        self._files.write("graph.dot", graph_to_dot(program.graph_module.graph))

    def _write_schedule(self, program: CapturedProgram) -> None:
        self._files.write(SCHEDULE, timeline_text([planned_track(program.graph_module.graph, self.device)]))

    def _write_timings(self) -> None:
        self._files.write("timings.json", json.dumps({"passes": self._timings}, indent=1) + "\n")


def unified_diff(before: str, after: str, name_before: str, name_after: str) -> str:
    """The unified difference of two dumps, three lines of context; empty when they differ in their title alone."""
    return difference.unified_diff(_untitled(before), _untitled(after), name_before, name_after)


def retitled(text: str, title: str) -> str:
    """A dump under another title."""
    _, end, rest = text.partition("\n")
    return f'"""{title}{end}{rest}'


def _untitled(text: str) -> list[str]:
    """The lines of a dump without its title, which every dump has to itself."""
    lines = text.splitlines()
    return ['"""', *lines[1:]] if text.startswith('"""') else lines


def _size(program: CapturedProgram) -> int:
    return len(program.graph_module.graph.nodes)
