"""``kimigraph run``."""

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from kimigraph.cli.console import reading

RESULT = {"outputs": {"logits": [1.0, 2.0, -0.5]}, "seconds": [0.3, 0.1, 0.2], "passed": True}


@pytest.fixture
def artifact(tmp_path: Path) -> Path:
    (tmp_path / "manifest.json").write_text(json.dumps({"target": "cpu:reference"}))
    return tmp_path


def test_options_reach_the_runtime(cli: Any, compiler: Any, artifact: Path) -> None:
    compiler.result = RESULT
    done = cli(
        "run", artifact, "--weights", "w", "--inputs", "i.safetensors", "--repeat", "3", "--cuda-graph", "--json"
    )
    assert compiler.calls == [(artifact, Path("w"), Path("i.safetensors"), 3, True)]
    assert json.loads(done.stdout) == RESULT


def test_the_table_shows_checksums_and_the_median(cli: Any, compiler: Any, artifact: Path) -> None:
    compiler.result = RESULT
    lines = [line.split() for line in cli("run", artifact).stdout.splitlines()]
    assert ["logits", "1", "2", "-0.5"] in lines
    assert ["seconds:", "0.200000", "(median", "of", "3)"] in lines
    assert ["checksums:", "those", "of", "the", "manifest"] in lines


def test_other_checksums_than_the_manifest_s_exit_with_3(cli: Any, compiler: Any, artifact: Path) -> None:
    compiler.result = {**RESULT, "passed": False}
    assert cli("run", artifact).exit_code == 3


def test_checksums_with_real_weights_are_not_judged(cli: Any, compiler: Any, artifact: Path) -> None:
    compiler.result = {**RESULT, "passed": None}
    done = cli("run", artifact)
    assert done.exit_code == 0 and "checksums:" not in done.stdout


def test_a_directory_without_a_manifest_is_a_usage_error(cli: Any, compiler: Any, tmp_path: Path) -> None:
    done = cli("run", tmp_path / "nothing")
    assert done.exit_code == 2 and "manifest.json" in done.stderr and compiler.calls == []


@pytest.mark.parametrize("text", ["{", "[]", "{}"])
def test_a_manifest_that_cannot_be_read_is_a_corrupt_artifact(
    cli: Any, compiler: Any, artifact: Path, text: str
) -> None:
    (artifact / "manifest.json").write_text(text)
    done = cli("run", artifact)
    assert done.exit_code == 5 and "compile again" in done.stderr and compiler.calls == []


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("terminal", [True, False])
def test_reading_shows_a_bar_on_a_terminal_alone(monkeypatch: pytest.MonkeyPatch, terminal: bool) -> None:
    stream = Terminal() if terminal else io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    with reading("reading weights") as watch:
        watch(3_000_000, 10_000_000)
    shown = stream.getvalue()
    assert ("reading weights" in shown and "3.0/10.0 MB" in shown) if terminal else not shown
