"""An installed wheel is whole: built from the sdist, it works from another directory with no checkout near."""

import importlib.util
import os
import shutil
import subprocess
import sys
import tarfile
import venv
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Environment:
    """An environment with the wheel in it: no checkout is on its path, and other packages come from ours."""

    home: Path

    @property
    def site(self) -> Path:
        """Where its packages are."""
        return next(self.home.glob("lib/python*/site-packages"))

    def run(self, program: str, *arguments: str, cwd: Path, **environment: str) -> str:
        """What one of its programs prints."""
        return run(str(self.home / "bin" / program), *arguments, cwd=cwd, **environment)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """The wheel installed, made from an sdist that was made from a copy of the sources."""
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
    venv.create(base / "clean", with_pip=False)
    clean = Environment(base / "clean")
    pip = (sys.executable, "-m", "pip", "--python", str(base / "clean" / "bin" / "python"), "--quiet")
    run(*pip, "install", "--no-deps", "--no-index", "--no-compile", str(wheel), cwd=base)
    # A folder that a .pth file names is searched, and the .pth files in it are not: so no editable install comes along.
    torch = importlib.util.find_spec("torch")
    assert torch is not None and torch.origin is not None
    (clean.site / "ours.pth").write_text(f"{Path(torch.origin).parents[1]}\n")
    return clean


def test_the_wheel_holds_every_module_and_no_links(installed: Environment) -> None:
    have = {str(path.relative_to(installed.site)) for path in (installed.site / "kimigraph").rglob("*.py")}
    want = {f"kimigraph/{path.relative_to(ROOT / 'kimigraph')}" for path in (ROOT / "kimigraph").rglob("*.py")}
    for room in ("passes", "codegen", "runtime"):
        want |= {f"kimigraph/{room}/{path.relative_to(ROOT / room)}" for path in (ROOT / room).rglob("*.py")}
    assert have == want
    assert not [path for path in installed.site.rglob("*") if path.is_symlink()]
    assert (installed.site / "kimigraph" / "py.typed").is_file()
    assert not (installed.site / "tests").exists() and not (installed.site / "passes").exists()


def test_data_files_are_in_the_wheel(installed: Environment) -> None:
    data = [
        path.relative_to(ROOT / "kimigraph")
        for path in (ROOT / "kimigraph").rglob("*")
        if path.suffix in (".json", ".toml", ".css", ".js") and path.is_file()
    ]
    assert [path for path in data if not (installed.site / "kimigraph" / path).is_file()] == []


IMPORTS = """
import importlib, os, pkgutil, sys
import kimigraph, torch
names = [info.name for info in pkgutil.walk_packages(kimigraph.__path__, "kimigraph.")]
names = [name for name in names if name != "kimigraph.__main__" and ".peers." not in name and ".templates." not in name]
for name in names:
    importlib.import_module(name)
for name in kimigraph.__all__:
    getattr(kimigraph, name)
home = os.path.realpath(sys.prefix)
outside = [n for n, m in list(sys.modules.items())
           if n.partition(".")[0] == "kimigraph" and not os.path.realpath(m.__file__).startswith(home)]
assert not outside, outside
assert "kimigraph" in torch._dynamo.list_backends(), torch._dynamo.list_backends()
print(len(names))
"""


def test_every_module_is_imported_from_the_wheel(installed: Environment, tmp_path: Path) -> None:
    """All but kernel text and peers, which import what only a GPU machine has."""
    assert int(installed.run("python", "-c", IMPORTS, cwd=tmp_path).split()[-1]) > 300


def test_the_installed_command_works_elsewhere(installed: Environment, tmp_path: Path) -> None:
    assert "Usage: kimigraph" in installed.run("kimigraph", "--help", cwd=tmp_path)
    shutil.copytree(ROOT / "examples" / "k31_tiny", tmp_path / "model")
    options = "--batch 1 --context 64 --set num_hidden_layers=4 --target cpu:reference --cache off --out artifact"
    printed = installed.run("kimigraph", "compile", "model", *options.split(), cwd=tmp_path)
    assert "fuse-lightning-indexer" in printed
    assert installed.run("kimigraph", "run", "artifact", cwd=tmp_path).count("\n") > 3


def test_the_shell_completes_the_installed_command(installed: Environment, tmp_path: Path) -> None:
    script = installed.run("kimigraph", cwd=tmp_path, _KIMIGRAPH_COMPLETE="source_bash")
    asked = f"""{script}
COMP_WORDS=(kimigraph export me); COMP_CWORD=2
PATH="{installed.home}/bin:$PATH"
$(complete -p kimigraph | sed 's/.*-F \\([^ ]*\\) .*/\\1/') kimigraph
echo "${{COMPREPLY[@]}}"
"""
    assert run("bash", "-c", asked, cwd=tmp_path).split() == ["mermaid"]
