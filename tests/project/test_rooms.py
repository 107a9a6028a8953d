"""The import contract of pyproject.toml covers every room, and would notice a wrong arrow."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LINT = "from importlinter.cli import lint_imports_command; lint_imports_command()"


def lint(project: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", LINT, "--no-cache"]
    return subprocess.run(command, cwd=project, env={"PYTHONPATH": str(project)}, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("kimigraph/ir/config.py", "import kimigraph.runtime"),
        ("kimigraph/ir/config.py", "import triton"),
        ("passes/base.py", "import kimigraph.adapters"),
        ("passes/base.py", "import kimigraph.codegen"),
        ("codegen/kernel.py", "import kimigraph.capture"),
        ("runtime/__init__.py", "import kimigraph.codegen"),
        ("kimigraph/adapters/__init__.py", "import kimigraph.capture"),
        ("kimigraph/models/__init__.py", "import transformers"),
    ],
)
def test_a_wrong_arrow_is_found(tmp_path: Path, file: str, line: str) -> None:
    for name in ("kimigraph", "passes", "codegen", "runtime"):
        shutil.copytree(ROOT / name, tmp_path / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    with (tmp_path / file).open("a", encoding="utf-8") as source:
        source.write(f"\n{line}\n")
    done = lint(tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "Contracts: " in done.stdout and line.split()[1] in done.stdout
