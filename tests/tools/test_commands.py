"""``compile --check-numerics``, ``bisect`` and ``reduce`` as a user types them, with an outside pass that is wrong."""

import json
import os
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from typer.testing import CliRunner

from kimigraph.cli.app import make_app
from kimigraph.ir.program import CapturedProgram
from kimigraph.passes import PassRegistry
from kimigraph.passes import registry as registry_module
from kimigraph.passes.registry import BUILT_IN

ROOT = Path(__file__).parents[2]
COMMON = [str(ROOT / "examples" / "k31_tiny"), "--context", "64", "--set", "num_hidden_layers=4", "--batch", "2"]
WRONG_LIMIT = "canonicalize,commute{wrong=off-by-one-limit at=le},raise-kda"


@pytest.fixture
def outside(wrong: ModuleType, captured: CapturedProgram, monkeypatch: pytest.MonkeyPatch) -> Generator[None]:
    """The outside pass, installed; the model is captured once for all tests, which may use their copies up."""
    registry = PassRegistry({**BUILT_IN, "commute": wrong.Commute})
    for module in ("registry", "pipeline"):
        monkeypatch.setattr(f"kimigraph.passes.{module}.default_registry", lambda: registry)
    assert registry_module.default_registry() is registry
    for user in ("compiler", "tools.investigate"):
        monkeypatch.setattr(f"kimigraph.{user}.capture", lambda model, config, weights=True: captured.copy())
    yield


def cli(*arguments: str) -> Any:
    return CliRunner().invoke(make_app(), list(arguments))


def test_numerics_are_a_table_of_the_report(tmp_path: Path, outside: None) -> None:
    command = [
        "compile",
        *COMMON,
        "--target",
        "cpu:reference",
        "--check-numerics",
        "--json",
        "--out",
        str(tmp_path / "a"),
    ]
    result = cli(*command, "--passes", "canonicalize,commute,raise-kda")
    assert result.exit_code == 0, result.stderr
    table = json.loads(result.stdout)["numerics"]
    assert [row["pass"] for row in table] == ["capture", "canonicalize", "commute", "raise-kda"]
    assert all(row["passed"] and row["max_rel_err"] <= 1e-4 for row in table)
    assert table[3]["max_rel_err"] > 0 and table[3]["tensor"]


def test_the_first_pass_out_of_tolerance_is_named(tmp_path: Path, outside: None) -> None:
    dumps = tmp_path / "dumps"
    result = cli(
        "compile", *COMMON, "--target", "cpu:reference", "--check-numerics", "--passes", WRONG_LIMIT,
        "--out", str(tmp_path / "a"), "--dump-passes", str(dumps),
    )  # fmt: skip
    assert result.exit_code == 3 and result.stdout == ""
    lines = result.stderr.splitlines()
    assert any(line.split()[:2] == ["1", "canonicalize"] and " ok" in line for line in lines)
    assert any(line.split()[:2] == ["2", "commute"] and "FAILED" in line for line in lines)
    assert "pass 2 'commute' changed the result" in lines[-1] and "kimigraph bisect" in lines[-1]
    assert (dumps / "002-commute.py").is_file() and not (dumps / "003-raise-kda.py").exists()
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("command", ["bisect", "reduce"])
def test_the_wrong_rewrite_is_found_and_its_file_stands_alone(tmp_path: Path, outside: None, command: str) -> None:
    path = tmp_path / "found.py"
    result = cli(command, *COMMON, "--passes", WRONG_LIMIT, "--out", str(path), "--json")
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert (found["index"], found["pass"]) == (2, "commute{wrong=off-by-one-limit at=le}")
    assert found["rewrite"] == "le" and found["number"] > 0 and found["reproducer"] == str(path)
    assert found["nodes"] <= 15 if command == "reduce" else found["nodes"] > 500
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    for arguments, code in (((), 1), (("--without-rewrite",), 0), (("--diff",), 0)):
        ran = subprocess.run([sys.executable, str(path), *arguments], env=environment, capture_output=True, text=True)
        assert ran.returncode == code, ran.stderr
    assert "aten.lt.Tensor" in ran.stdout


def test_nothing_to_find_and_too_many_shapes(tmp_path: Path, outside: None) -> None:
    result = cli("bisect", *COMMON, "--passes", "canonicalize,commute")
    assert result.exit_code == 0 and "every pass of 'canonicalize,commute' keeps the result" in result.stdout
    result = cli("reduce", *COMMON, "--batch", "3")
    assert result.exit_code == 2 and "one shape at a time" in result.stderr
