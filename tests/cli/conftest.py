"""The command line in this process, with the compiler behind it replaced by one that records what it was asked."""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from typer.testing import CliRunner

from kimigraph.cli.app import make_app
from kimigraph.ir.config import CompileConfig
from kimigraph.ir.report import CompileReport


@dataclass
class Recorder:
    """Stands in for the compiler and the runtime: keeps the requests, answers with ``reports`` or raises ``error``."""

    reports: list[CompileReport] = field(default_factory=list)
    result: dict[str, Any] = field(default_factory=dict)
    error: BaseException | None = None
    noise: str = ""
    configs: list[CompileConfig] = field(default_factory=list)
    calls: list[tuple[Any, ...]] = field(default_factory=list)

    def compile_source(
        self,
        source: str,
        configs: list[CompileConfig],
        out: Path | None,
        notify: Callable[[str], None],
        below: bool | None = None,
    ) -> list[CompileReport]:
        self.calls.append((source, out))
        self.configs += configs
        notify("capturing")
        self.speak()
        return self.reports or [CompileReport(source=source, shape_key=f"b{c.batch}") for c in configs]

    def run_artifact(
        self,
        directory: Path,
        weights: Path | None,
        inputs: Path | None,
        repeat: int,
        watch: Callable[[int, int], None],
        cuda_graph: bool,
    ) -> dict[str, Any]:
        self.calls.append((directory, weights, inputs, repeat, cuda_graph))
        self.speak()
        return self.result

    def speak(self) -> None:
        if self.noise:
            print(self.noise)
        if self.error is not None:
            raise self.error


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    for name, function in {"compiler": recorder.compile_source, "run": recorder.run_artifact}.items():
        module: Any = ModuleType(f"kimigraph.{name}")
        setattr(module, function.__name__, function)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.delenv("KIMIGRAPH_TRACEBACK", raising=False)
    return recorder


@pytest.fixture
def cli() -> Callable[..., Any]:
    """``cli("compile", "model", ...)`` -> the result, with exit_code, stdout and stderr."""
    return lambda *arguments: CliRunner().invoke(make_app(), [str(argument) for argument in arguments])
