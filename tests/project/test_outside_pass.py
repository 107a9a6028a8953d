"""The worked outside package installs, is found by its entry point, fires by ``--passes``, and passes its own tests."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PASSES = "canonicalize,raise-kda,fuse-lightning-indexer,fuse-sparse-attention,fuse-rms-norm{min-width=32}"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package installed, built from a copy; nothing is fetched."""
    base = tmp_path_factory.mktemp("outside_pass")
    shutil.copytree(ROOT / "examples" / "outside_pass", base / "source")
    options = "--quiet --no-deps --no-index --no-build-isolation --disable-pip-version-check --target".split()
    command = [sys.executable, "-m", "pip", "install", *options, str(base / "site"), str(base / "source")]
    subprocess.run(command, check=True, cwd=base)
    return base / "site"


def run(installed: Path, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(installed), str(ROOT)])
    command = [sys.executable, "-m", *arguments]
    return subprocess.run(command, cwd=cwd, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)


def test_the_command_line_finds_and_runs_it(installed: Path, tmp_path: Path) -> None:
    listed = run(installed, "kimigraph", "passes", "list", cwd=tmp_path)
    assert "fuse-rms-norm" in listed.stdout, listed.stderr
    compiled = run(
        installed,
        *("kimigraph", "compile", str(ROOT / "examples" / "k31_tiny"), "--target", "cpu:reference"),
        *("--context", "32", "--set", "num_hidden_layers=2", "--cache", "off", "--no-report", "--json"),
        *("--passes", PASSES, "--require-fusion", "fuse-rms-norm", "--check-numerics", "--out", "artifact"),
        cwd=tmp_path,
    )
    assert compiled.returncode == 0, compiled.stderr
    report: Any = json.loads(compiled.stdout)
    counts = {entry["rule"]: entry["count"] for entry in report["fusions"]}
    assert counts["fuse-rms-norm"] >= 5 and counts["raise-kda"] == 2  # two norms a layer and the last one
    last = report["numerics"][-1]
    assert (last["pass"], last["modified"], last["passed"]) == ("fuse-rms-norm", True, True)
    program = (tmp_path / "artifact" / "program.py").read_text(encoding="utf-8")
    assert program.count("aten.rms_norm") == counts["fuse-rms-norm"]


def test_without_the_package_the_name_is_unknown(tmp_path: Path) -> None:
    done = run(tmp_path, "kimigraph", "passes", "show", "fuse-rms-norm", cwd=tmp_path)
    assert done.returncode == 2 and "fuse-rms-norm" in done.stderr


def test_its_own_tests_pass(installed: Path, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "examples" / "outside_pass" / "tests", tmp_path / "tests")
    options = ("-q", "-p", "no:cacheprovider", "--import-mode=importlib", "tests")
    done = run(installed, "pytest", *options, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-3000:]
