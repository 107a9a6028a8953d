"""An installed wheel is whole: built from the sdist, it works from another directory with no checkout near."""

import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("kimigraph", "passes", "codegen", "runtime", "pyproject.toml", "README.md", "LICENSE")


def run(*command: str, cwd: Path, **environment: str) -> str:
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | environment
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build(what: str, cwd: Path, out: Path) -> Path:
    code = f"import sys, setuptools.build_meta as b; b.build_{what}(sys.argv[1])"
    run(sys.executable, "-c", code, str(out), cwd=cwd)
    (built,) = out.iterdir()
    return built


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel installed, made from an sdist that was made from a copy of the sources."""
    base = tmp_path_factory.mktemp("packaging")
    source = base / "source"
    source.mkdir()
    for name in SOURCES:
        path = ROOT / name
        if path.is_dir():
            shutil.copytree(path, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(path, source)
    sdist = build("sdist", source, base / "sdist")
    shutil.rmtree(source)
    with tarfile.open(sdist) as archive:
        archive.extractall(base / "unpacked", filter="data")
    (unpacked,) = (base / "unpacked").iterdir()
    wheel = build("wheel", unpacked, base / "wheel")
    shutil.rmtree(unpacked)
    site = base / "site"
    run(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(site), str(wheel), cwd=base)
    return site


def test_the_wheel_holds_every_module_and_no_links(installed: Path) -> None:
    have = {str(path.relative_to(installed)) for path in (installed / "kimigraph").rglob("*.py")}
    want = {f"kimigraph/{path.relative_to(ROOT / 'kimigraph')}" for path in (ROOT / "kimigraph").rglob("*.py")}
    for room in ("passes", "codegen", "runtime"):
        want |= {f"kimigraph/{room}/{path.relative_to(ROOT / room)}" for path in (ROOT / room).rglob("*.py")}
    assert have == want
    assert not [path for path in installed.rglob("*") if path.is_symlink()]
    assert (installed / "kimigraph" / "py.typed").is_file()
    assert not (installed / "tests").exists() and not (installed / "passes").exists()


def test_data_files_are_in_the_wheel(installed: Path) -> None:
    data = [
        path.relative_to(ROOT / "kimigraph")
        for path in (ROOT / "kimigraph").rglob("*")
        if path.suffix in (".json", ".toml") and path.is_file()
    ]
    assert [path for path in data if not (installed / "kimigraph" / path).is_file()] == []


def test_the_installed_command_works_elsewhere(installed: Path, tmp_path: Path) -> None:
    command = (sys.executable, "-m", "kimigraph")
    path = {"PYTHONPATH": str(installed)}
    where = "import kimigraph.passes as p, kimigraph as k; print(k.__file__); print(p.__file__)"
    files = run(sys.executable, "-c", where, cwd=tmp_path, **path).split()
    assert [file for file in files if not file.startswith(str(installed))] == []
    assert "fuse-lightning-indexer" in run(*command, "passes", "list", cwd=tmp_path, **path)
    shutil.copytree(ROOT / "examples" / "k31_tiny", tmp_path / "model")
    options = "--batch 1 --context 64 --target cpu:reference --cache off --out artifact"
    printed = run(*command, "compile", "model", *options.split(), cwd=tmp_path, **path)
    assert "fuse-lightning-indexer" in printed
    assert (tmp_path / "artifact" / "program.py").is_file()
    assert (installed / "bin" / "kimigraph").is_file()
