"""The command as a process: start-up without heavy packages, closed pipes, interruption."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

BLOCK = """
import importlib.abc, sys

class Block(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"torch", "triton", "transformers", "onnx", "numpy", "safetensors"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Block())
sys.argv = ["kimigraph", *sys.argv[1:]]
from kimigraph.cli import main
main()
"""


def test_version_names_the_package() -> None:
    done = subprocess.run([sys.executable, "-m", "kimigraph", "--version"], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("kimigraph ")


@pytest.mark.parametrize(
    "command",
    [
        [],
        ["compile"],
        ["run"],
        ["passes"],
        ["passes", "show"],
        ["dumps", "diff"],
        ["export", "onnx"],
        ["export", "dot"],
    ],
)
def test_help_needs_none_of_the_heavy_packages(command: list[str]) -> None:
    done = subprocess.run([sys.executable, "-c", BLOCK, *command, "--help"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Usage: kimigraph" in done.stdout and "\x1b" not in done.stdout


def test_the_shell_completes_commands_and_options() -> None:
    for words, want in (("kimigraph com", "compile"), ("kimigraph compile --disable-p", "--disable-pass")):
        asked = {"_KIMIGRAPH_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
        code = "import sys; sys.argv[0] = 'kimigraph'; from kimigraph.cli import main; main()"
        done = subprocess.run([sys.executable, "-c", code], env=os.environ | asked, capture_output=True, text=True)
        assert done.stdout.split() == [want], done.stderr


def test_a_missing_package_is_named_without_a_traceback() -> None:
    done = subprocess.run([sys.executable, "-c", BLOCK, "passes", "list"], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr == "error: this needs the package torch, which is not installed: pip install 'kimigraph'\n"


WITHOUT_ONNX = """
import importlib.util, importlib.metadata, sys
found, versions = importlib.util.find_spec, importlib.metadata.version
missing, old = sys.argv[1:3]
importlib.util.find_spec = lambda name, *rest: None if name == missing else found(name, *rest)
importlib.metadata.version = lambda name: "1.17.3" if name == old else versions(name)
sys.argv = ["kimigraph", "export", "onnx", "model", "--out", "a.onnx"]
from kimigraph.cli import main
main()
"""


@pytest.mark.parametrize(
    ("missing", "old", "message"),
    [
        ("onnxruntime", "", "ONNX needs onnxruntime: pip install 'kimigraph[onnx]'"),
        ("", "onnx", "onnx 1.17.3 is older than 1.18: pip install -U 'kimigraph[onnx]'"),
    ],
)
def test_an_extra_that_is_missing_or_old_is_named(missing: str, old: str, message: str) -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_ONNX, missing, old], capture_output=True, text=True)
    assert (done.returncode, done.stderr.splitlines()[-1]) == (2, f"error: {message}")


SLOW = """
import signal, sys, time, types
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background of a script inherits it ignored
module = types.ModuleType("kimigraph.compiler")
def compile_source(*arguments, **options):
    print("started", file=sys.stderr, flush=True)
    time.sleep(60)
module.compile_source = compile_source
sys.modules["kimigraph.compiler"] = module
sys.argv = ["kimigraph", "compile", "model"]
from kimigraph.cli import main
main()
"""


def test_an_interrupt_ends_the_process_with_130_and_one_word() -> None:
    process = subprocess.Popen([sys.executable, "-c", SLOW], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    assert process.stderr.readline() == "started\n"
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=20)
    assert (process.returncode, out, err) == (130, "", "interrupted\n")


STAGES = """
import sys, time, types
from kimigraph.ir.report import CompileReport
module = types.ModuleType("kimigraph.compiler")
def compile_source(source, configs, out, notify, below=False):
    notify("capturing the model")
    time.sleep(0.5)
    return [CompileReport(source=source, shape_key="b1")]
module.compile_source = compile_source
sys.modules["kimigraph.compiler"] = module
sys.argv = ["kimigraph", "compile", "model"]
from kimigraph.cli import main
main()
"""


def test_progress_shows_on_a_terminal_and_not_in_the_result() -> None:
    terminal, child = os.openpty()
    process = subprocess.Popen([sys.executable, "-c", STAGES], stdout=subprocess.PIPE, stderr=child, text=True)
    os.close(child)
    out, _ = process.communicate(timeout=30)
    shown = os.read(terminal, 100_000).decode()
    os.close(terminal)
    assert process.returncode == 0
    assert "capturing the model" in shown
    assert out.startswith("model: b1") and "capturing" not in out


@pytest.mark.parametrize("name", [b"\xe6\xa8\xa1\xe5\x9e\x8b \xc3\xa9", b"undecodable-\xff"])
@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_a_path_of_any_bytes_is_named_without_a_traceback(tmp_path: Path, name: bytes, encoding: str) -> None:
    path = os.path.join(os.fsencode(tmp_path), name)
    os.mkdir(path)
    command = [os.fsencode(sys.executable), b"-m", b"kimigraph", b"run", path]
    done = subprocess.run(command, env=os.environ | {"PYTHONIOENCODING": encoding}, capture_output=True)
    assert done.returncode == 2
    assert b"Traceback" not in done.stderr and b"is no artifact" in done.stderr


def test_a_reader_that_leaves_early_causes_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "000-capture.py").write_text("x = 1\n" * 200_000)
    read, write = os.pipe()
    command = [sys.executable, "-m", "kimigraph", "dumps", "show", str(tmp_path), "0"]
    process = subprocess.Popen(command, stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    os.close(read)
    _, err = process.communicate(timeout=60)
    assert "Traceback" not in err and "Exception ignored" not in err
