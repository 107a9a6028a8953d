"""Programs with regions print, read back and run as scripts."""

import subprocess
import sys
from pathlib import Path
from runpy import run_path
from typing import Any

import torch
from torch import Tensor

from kimigraph.ir.printer import print_program
from kimigraph.ir.purity import region_module
from kimigraph.ir.reader import read_program
from kimigraph.ir.verifier import verify
from kimigraph.passes import PassContext, Pipeline, run_pipeline
from kimigraph.passes.fuse_pointwise import FusePointwise

ROOT = Path(__file__).parents[3]


def function(x: Tensor, state: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    new = torch.tanh(state * 0.5 + x)
    state.copy_(new)
    product = new.view(4, 6) @ weight
    return torch.softmax(product, -1).bfloat16(), product.sum(-1)


def test_a_printed_region_reads_back_and_runs(trace: Any, run: Any, context: PassContext, tmp_path: Path) -> None:
    tensors = torch.randn(4, 6), torch.randn(4, 6), torch.randn(6, 6)
    program = trace(function, *tensors)
    run_pipeline(program, Pipeline((FusePointwise(),)), context)
    wanted = run(program, *tensors)
    path = tmp_path / "program.py"
    path.write_text(print_program(program))
    facts = run_path(str(path))
    again = read_program(facts["step"], facts["INPUTS"], facts["OUTPUTS"], facts["CONSTANTS"])
    verify(again)
    calls = [node for node in again.graph_module.graph.nodes if node.op == "call_module"]
    assert len(calls) == 2 and {call.meta["region"] for call in calls} == {"pointwise"}
    assert all(region_module(call) is not None for call in calls)
    found = run(again, *tensors)
    for new, old in zip([*found[0], *found[1]], [*wanted[0], *wanted[1]], strict=True):
        assert torch.equal(new, old)
    before, after = (text.replace("; replaces", "#").splitlines() for text in (path.read_text(), print_program(again)))
    assert [line.partition("#")[0] for line in after] == [line.partition("#")[0] for line in before]
    script = subprocess.run([sys.executable, path], cwd=ROOT, capture_output=True, text=True, check=False)
    assert script.returncode == 0 and len(script.stdout.splitlines()) == 3, script.stderr
