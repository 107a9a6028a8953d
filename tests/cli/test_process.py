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


@pytest.mark.parametrize("command", [[], ["compile"], ["run"], ["passes"], ["passes", "show"], ["dumps", "diff"]])
def test_help_needs_none_of_the_heavy_packages(command: list[str]) -> None:
    done = subprocess.run([sys.executable, "-c", BLOCK, *command, "--help"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Usage: kimigraph" in done.stdout and "\x1b" not in done.stdout


def test_a_missing_package_is_named_without_a_traceback() -> None:
    done = subprocess.run([sys.executable, "-c", BLOCK, "passes", "list"], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr == "error: this needs the package torch, which is not installed: pip install 'kimigraph'\n"


SLOW = """
import sys, time, types
module = types.ModuleType("kimigraph.compiler")
def compile_source(*arguments):
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


def test_a_reader_that_leaves_early_causes_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "000-capture.py").write_text("x = 1\n" * 200_000)
    read, write = os.pipe()
    command = [sys.executable, "-m", "kimigraph", "dumps", "show", str(tmp_path), "0"]
    process = subprocess.Popen(command, stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    os.close(read)
    _, err = process.communicate(timeout=60)
    assert "Traceback" not in err and "Exception ignored" not in err
