"""``kimigraph passes`` and ``kimigraph dumps``."""

import json
from pathlib import Path
from typing import Any

import pytest

from kimigraph.ir.config import CompileConfig
from kimigraph.passes import default_pipeline
from kimigraph.passes.registry import BUILT_IN


def test_passes_are_listed_in_the_order_of_the_pipeline(cli: Any) -> None:
    done = cli("passes", "list")
    listed = [line.split()[0] for line in done.stdout.splitlines()]
    assert done.exit_code == 0
    assert listed[: len(BUILT_IN)] == default_pipeline(CompileConfig(opt_level=3)).names
    assert all(len(line.split()) > 1 for line in done.stdout.splitlines())


def test_a_pass_is_shown_with_its_place(cli: Any) -> None:
    done = cli("passes", "show", "fuse-sparse-attention")
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert done.exit_code == 0
    place = list(BUILT_IN).index("fuse-sparse-attention") + 1
    assert "name fuse-sparse-attention" in lines and "fusion yes" in lines
    assert f"default pipeline {place} of {len(default_pipeline(CompileConfig()))}" in lines


def test_an_unknown_pass_is_a_usage_error_with_the_nearest_name(cli: Any) -> None:
    done = cli("passes", "show", "canonicalise")
    assert done.exit_code == 2 and "canonicalize" in done.stderr and done.stdout == ""


@pytest.fixture
def dumps(tmp_path: Path) -> Path:
    (tmp_path / "000-capture.py").write_text("a = 1\nb = 2\n")
    (tmp_path / "001-canonicalize.py").write_text("a = 1\n")
    (tmp_path / "001-canonicalize.diff").write_text("-b = 2\n")
    timings = {"passes": [{"index": 0, "nodes": 2}, {"index": 1, "nodes": 1, "seconds": 0.25}]}
    (tmp_path / "timings.json").write_text(json.dumps(timings))
    return tmp_path


def test_dumps_are_listed_with_what_changed(cli: Any, dumps: Path) -> None:
    rows = [line.split() for line in cli("dumps", "list", dumps).stdout.splitlines()]
    assert rows[1:] == [
        ["0", "capture", "2", "000-capture.py"],
        ["1", "canonicalize", "yes", "1", "0.250", "001-canonicalize.py"],
    ]


def test_a_dump_is_printed_as_it_stands(cli: Any, dumps: Path) -> None:
    assert cli("dumps", "show", dumps, "0").stdout == "a = 1\nb = 2\n"


@pytest.mark.parametrize("numbers", [["1"], ["0", "1"]])
def test_a_difference_is_unified(cli: Any, dumps: Path, numbers: list[str]) -> None:
    lines = cli("dumps", "diff", dumps, *numbers).stdout.splitlines()
    assert " a = 1" in lines and "-b = 2" in lines


@pytest.mark.parametrize("arguments", [["list", "nowhere"], ["show", "nowhere", "0"], ["diff", "nowhere", "1"]])
def test_dumps_that_are_not_there_are_a_usage_error(cli: Any, tmp_path: Path, arguments: list[str]) -> None:
    arguments[1] = str(tmp_path / arguments[1])
    done = cli("dumps", *arguments)
    assert done.exit_code == 2 and "nowhere" in done.stderr
