"""A pass that fails under ``--dump-passes`` leaves a script that runs it again on the graph that it got."""

import os
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

import kimigraph
from kimigraph.capture import capture_module
from kimigraph.ir.config import CompileConfig
from kimigraph.ir.errors import CompileError, NumericsError
from kimigraph.passes import DumpPasses, PassContext, Pipeline, run_pipeline
from kimigraph.passes.canonicalize import Canonicalize
from kimigraph.tools.numerics import CheckNumerics

PASS = '''
from dataclasses import dataclass
from typing import ClassVar

import torch

from kimigraph.ir.remarks import PassResult
from kimigraph.passes import Pass


@dataclass(frozen=True)
class Odd(Pass):
    """Rewrites a sine."""

    name: ClassVar[str] = "odd"
    summary: ClassVar[str] = "has a fault"
    limit: int = 3

    def apply(self, program, context):
        node = next(node for node in program.graph_module.graph.nodes if node.target is torch.ops.aten.sin.default)
        FAULT
        return PassResult(True)
'''
CRASH = 'node.replace_all_uses_with(node.args[0]); raise ValueError("""no \\"way\\" on""")'
WRONG = "node.target = torch.ops.aten.cos.default"
RIGHT = "pass"


class Step(torch.nn.Module):
    """Writes a state and returns a cosine, with something for canonicalize to do."""

    def forward(self, x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        state.add_(x.view(2, 3).sin() * torch.tensor([1.0, 2.0, 3.0]))
        return state.exp() + x.sin()


@pytest.fixture
def odd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Writes a module ``odd_pass`` with that fault and returns its pass; other processes import it, too."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(Path(kimigraph.__file__).parents[1])]))
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")

    def write(fault: str) -> Any:
        (tmp_path / "odd_pass.py").write_text(PASS.replace("FAULT", fault))
        monkeypatch.delitem(sys.modules, "odd_pass", raising=False)
        return import_module("odd_pass").Odd(limit=7)

    return write


def run(path: Path) -> tuple[int, str]:
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, cwd=path.parent)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("fault", "expected", "message"),
    [(CRASH, CompileError, "FAILS (crash): ValueError at node"), (WRONG, NumericsError, "FAILS (numerics)")],
    ids=["crash", "numerics"],
)
def test_the_seventh_pass_fails(
    fault: str, expected: type[Exception], message: str, odd: Callable[[str], Any], tmp_path: Path
) -> None:
    config = CompileConfig()
    program = capture_module(Step(), (torch.randn(2, 3), torch.randn(2, 3)), {}, config)
    pipeline = Pipeline((*[Canonicalize()] * 6, odd(fault), Canonicalize()))
    dumps = tmp_path / "dumps"
    with pytest.raises(expected, match="odd"):
        run_pipeline(program, pipeline, PassContext(config), [DumpPasses(dumps), CheckNumerics()])
    names = {path.name for path in dumps.iterdir()}
    assert {f"{n:03d}-canonicalize.py" for n in range(1, 7)} | {"000-capture.py", "007-odd.failed.txt"} <= names
    assert not [name for name in names if name.startswith("008")]

    path = dumps / "reproducer.py"
    text = path.read_text(encoding="utf-8")
    assert "PASS = 'odd{limit=7}'" in text and "PASS_SOURCE = 'odd_pass:Odd'" in text
    assert text.count("aten.sin.default") == 1 and "aten.cos.default" not in text  # merged, and before the pass
    status, said = run(path)
    assert status == 1 and message in said, said
    odd(RIGHT)
    assert run(path) == (0, "same result\n")
