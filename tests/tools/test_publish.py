"""What a compilation leaves to read: in the artifact, in the dump directory, after a failure, and not when off."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import kimigraph
from kimigraph.ir.config import CompileConfig
from kimigraph.ir.errors import KimigraphError
from kimigraph.ir.program import CapturedProgram
from kimigraph.ir.remarks import PassResult
from kimigraph.passes import Pass, PassContext, register, registered_passes
from kimigraph.passes.registry import default_registry
from kimigraph.tools.explain import explain


@dataclass(frozen=True)
class BreakForReports(Pass):
    """Raises."""

    name: ClassVar[str] = "break-for-reports"
    summary: ClassVar[str] = "raise"

    def apply(self, program: CapturedProgram, context: PassContext) -> PassResult:
        raise ValueError("broken on purpose")


class Scale(nn.Module):
    """A linear layer whose product is computed twice."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).relu() + self.linear(x).relu()


@pytest.fixture
def compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Any, Path]]:
    """Compile the module with those options and save it; the cache is one of its own."""
    monkeypatch.setenv("KIMIGRAPH_CACHE_DIR", str(tmp_path / "cache"))

    def run(name: str = "artifact", **options: Any) -> tuple[Any, Path]:
        torch.manual_seed(0)
        config = CompileConfig(**{"target": "cpu:reference", "cache": "off", **options})
        made = kimigraph.optimize(Scale(), (torch.ones(2, 4),), config)
        return made, made.save(tmp_path / name)

    return run


def test_an_artifact_can_be_read_by_people_and_tools(compiled: Callable[..., Any], tmp_path: Path) -> None:
    made, artifact = compiled(dump_passes=str(tmp_path / "dumps"))
    document = json.loads((artifact / "report.json").read_text())
    assert document["graph"]["nodes_before"] > document["graph"]["nodes_after"] > 0
    assert document["graph"]["estimated_us"] == pytest.approx(5 * document["launches"]["after"], rel=0.05)
    remarks = [json.loads(line) for line in (artifact / "remarks.jsonl").read_text().splitlines()]
    assert remarks == document["remarks"] == json.loads(json.dumps(made.report().remarks))
    page = (artifact / "report.html").read_text()
    assert "canonicalize" in page and "@@ -" in page and "lines in" in page
    assert (tmp_path / "dumps/report.html").read_text() == page
    assert "report.html" in json.loads((tmp_path / "dumps/.kimigraph-dumps.json").read_text())["files"]
    assert made.report().report is not None and made.report().report.endswith("report.html")
    fusions = [name for name, kind in registered_passes().items() if kind.fusion]
    assert [report.rule for report in explain(artifact)] == fusions


def test_the_same_dump_directory_serves_twice(compiled: Callable[..., Any], tmp_path: Path) -> None:
    compiled("one", dump_passes=str(tmp_path / "dumps"))
    compiled("two", dump_passes=str(tmp_path / "dumps"))
    assert (tmp_path / "dumps/report.html").is_file()


def test_a_hit_shows_the_passes_of_the_original(compiled: Callable[..., Any]) -> None:
    first, _ = compiled("one", cache="use")
    second, artifact = compiled("two", cache="use")
    assert (first.report().cache["status"], second.report().cache["status"]) == ("miss", "hit")
    page = (artifact / "report.html").read_text()
    assert "lines in" in page and ">hit" in page.replace("<dd>", ">")


def test_nothing_is_dumped_or_written_when_off(compiled: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a dump was made")

    for module in ("kimigraph.passes.instruments.dump", "kimigraph.report.page"):
        for name in ("print_program", "read_data"):
            monkeypatch.setattr(f"{module}.{name}", refuse, raising=False)
    made, artifact = compiled(report=False)
    assert made.report().report is None
    assert not {"report.html", "report.json", "remarks.jsonl"} & {path.name for path in artifact.iterdir()}


@pytest.fixture
def breaking() -> Iterator[None]:
    """A pass that raises, known for the length of a test."""
    register(BreakForReports)
    yield
    del default_registry().sources[BreakForReports.name]


@pytest.mark.usefixtures("breaking")
def test_a_crash_leaves_a_page_of_the_passes_before_it(tmp_path: Path) -> None:
    config = CompileConfig(
        target="cpu:reference",
        cache="off",
        dump_passes=str(tmp_path / "dumps"),
        passes="canonicalize,break-for-reports",
        context=16,
    )
    with pytest.raises(KimigraphError, match="broken on purpose"):
        kimigraph.optimize(Scale(), (torch.ones(2, 4),), config)
    page = (tmp_path / "dumps/report.html").read_text()
    assert "broken on purpose" in page and "lines in" in page
