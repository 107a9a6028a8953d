"""A printed program reads back to the same text, under its nodes' names."""

from pathlib import Path
from runpy import run_path
from typing import Any

import pytest

from kimigraph.ir.errors import CompileError
from kimigraph.ir.reader import read_program
from kimigraph.ir.verifier import verify

PROGRAM = '''
import torch
from kimigraph.ir.program import InputSpec

INPUTS = (
    InputSpec("x", "input", "x", (2, 4), (4, 1), "float32"),
    InputSpec("state", "cache", "state.0", (2, 4), (4, 1), "float32", mutated=True),
)
OUTPUTS = ("sum_2",)
CONSTANTS = {"table": torch.tensor([1.0, 2.0, 3.0, 4.0])}


@torch.no_grad()
def step(x, state):
    """One step."""
    # a comment
    table = CONSTANTS["table"]  # float32[4]
    split = torch.ops.aten.split.Tensor(x, 2, -1)  # two halves
    getitem_1 = split[1]; del split  # float32[2, 2]
    cat_3 = torch.ops.aten.cat.default([getitem_1, getitem_1], -1)
    clamp = torch.ops.aten.clamp.default(cat_3, float("-inf"), None)
    torch.ops.aten.copy_.default(state, cat_3)  # writes state
    sum_2 = torch.ops.aten.add.Tensor(cat_3, table, alpha=2)
    return (sum_2,)
'''


def read(tmp_path: Path, text: str) -> Any:
    path = tmp_path / "program.py"
    path.write_text(text)
    facts = run_path(str(path))
    return facts, read_program(facts["step"], facts["INPUTS"], facts["OUTPUTS"], facts["CONSTANTS"])


def test_it_computes_the_same_under_the_same_names(tmp_path: Path) -> None:
    facts, program = read(tmp_path, PROGRAM)
    verify(program)
    names = [node.name for node in program.graph_module.graph.nodes]
    assert names[:6] == ["x", "state", "table", "split", "getitem_1", "cat_3"] and "sum_2" in names
    torch: Any = facts["torch"]
    x, want, got = torch.randn(2, 4), torch.zeros(2, 4), torch.zeros(2, 4)
    (expected,), (found,) = facts["step"](x, want), program.graph_module(x, got)
    assert torch.equal(found, expected) and torch.equal(got, want) and torch.equal(want[:, :2], x[:, 2:])


@pytest.mark.parametrize("statement", ["for i in range(2): pass", "y = x + x", "z = helper(x)"])
def test_what_no_program_prints_is_refused(tmp_path: Path, statement: str) -> None:
    text = PROGRAM.replace("    clamp = ", f"    {statement}\n    clamp = ")
    text = text.replace("OUTPUTS =", "def helper(x): return x\nOUTPUTS =")
    with pytest.raises(CompileError, match="is no statement of a printed program"):
        read(tmp_path, text)
