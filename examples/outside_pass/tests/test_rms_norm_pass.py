"""The checklist of docs/writing_passes.md, item by item."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rms_norm_pass import FuseRmsNorm
from torch import Tensor, nn

from kimigraph.capture import capture_module
from kimigraph.ir.config import CompileConfig
from kimigraph.ir.data_sets import data_sets
from kimigraph.ir.fake import infer
from kimigraph.ir.program import CapturedProgram
from kimigraph.passes import DumpPasses, PassContext, Pipeline, default_pipeline, run_pipeline
from kimigraph.tools.numerics import Reference

ATEN = torch.ops.aten
CONFIG = CompileConfig(passes="canonicalize,fuse-rms-norm")
WIDTH = 7
OLD = (ATEN.rsqrt.default, ATEN.mean.dim, ATEN.square.default, ATEN.pow.Tensor_Scalar)

Written = Callable[[Tensor, Tensor], Any]
SPELLINGS: dict[str, Written] = {
    "square": lambda x, state: x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5),
    "swapped": lambda x, state: torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * x,
    "power": lambda x, state: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5),
    "product": lambda x, state: x * torch.rsqrt((x * x).mean(2, keepdim=True) + 1e-5),
    "state": lambda x, state: state.add_(x) * torch.rsqrt(state.square().mean(-1, keepdim=True) + 1e-5),
}


def used_twice(x: Tensor, state: Tensor) -> Any:
    root = torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)
    return x * root, root


def transposed(x: Tensor, state: Tensor) -> Any:
    turned = x.transpose(0, 1)
    return turned * torch.rsqrt(turned.square().mean(-1, keepdim=True) + 1e-5)


def half(x: Tensor, state: Tensor) -> Any:
    return SPELLINGS["square"](x.to(torch.bfloat16), state)


REFUSALS: dict[str, tuple[Written, str, str]] = {
    "used elsewhere": (used_twice, "rsqrt", "the intermediate rsqrt is used elsewhere, by output"),
    "layout": (transposed, "transpose", "is not contiguous"),
    "dtype": (half, "_to_copy", "torch.bfloat16"),
}
OTHERS: dict[str, Written] = {
    "another axis": lambda x, state: x * torch.rsqrt(x.square().mean(1, keepdim=True) + 1e-5),
    "another tensor": lambda x, state: state * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5),
    "no constant": lambda x, state: x * torch.rsqrt(x.square().mean(-1, keepdim=True) + x[:, :, :1]),
}


class Step(nn.Module):
    """A function as a module."""

    def __init__(self, function: Written) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor, state: Tensor) -> Any:
        return self.function(x, state)


def captured(function: Written) -> CapturedProgram:
    tensors = torch.randn(2, 3, WIDTH), torch.randn(2, 3, WIDTH)
    program = capture_module(Step(function), tensors, {}, CONFIG)
    run_pipeline(program, Pipeline.parse("canonicalize"), PassContext(CONFIG))
    return program


def fuse(program: CapturedProgram, item: FuseRmsNorm | None = None) -> Any:
    [record] = run_pipeline(program, Pipeline((item or FuseRmsNorm(),)), PassContext(CONFIG))
    return record.result


def targets(program: CapturedProgram) -> list[Any]:
    return [node.target for node in program.graph_module.graph.nodes]


@pytest.mark.parametrize("name", SPELLINGS)
def test_values_stay_and_the_old_operators_are_gone(name: str) -> None:
    program = captured(SPELLINGS[name])
    reference = Reference(program, data_sets())
    result = fuse(program)
    assert targets(program).count(ATEN.rms_norm.default) == 1 and not set(OLD) & set(targets(program))
    assert [remark.kind for remark in result.remarks] == ["passed"] and result.statistics["fused"] == 1
    comparison = reference.compare(program)
    assert comparison.passed, comparison.fault
    assert fuse(program).modified is False


@pytest.mark.parametrize("name", REFUSALS)
def test_a_near_miss_is_left_alone_with_a_reason(name: str) -> None:
    function, node, reason = REFUSALS[name]
    program = captured(function)
    before = str(program.graph_module.graph)
    result = fuse(program)
    assert result.modified is False and str(program.graph_module.graph) == before
    [remark] = result.remarks
    assert remark.kind == "missed" and remark.node.startswith(node) and reason in remark.message
    assert remark.score == 4 and remark.source


def test_a_write_between_square_and_product_is_noticed() -> None:
    program = captured(SPELLINGS["square"])
    graph = program.graph_module.graph
    x, product = (next(n for n in graph.nodes if n.target == target) for target in ("x", ATEN.mul.Tensor))
    with graph.inserting_before(product):
        infer(graph.call_function(ATEN.add_.Tensor, (x, 1.0)))
    before = str(graph)
    result = FuseRmsNorm().apply(program, PassContext(CONFIG))
    assert result.modified is False and str(graph) == before
    [remark] = result.remarks
    assert remark.node.startswith("add_") and remark.message == "x is written between its square and the product"


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_no_norm_is_not_even_near(name: str) -> None:
    result = fuse(captured(OTHERS[name]))
    assert (result.modified, result.remarks) == (False, ())


def test_the_text_form_round_trips_and_the_option_counts() -> None:
    pipeline = Pipeline.parse("fuse-rms-norm{min-width=8}")
    assert pipeline == Pipeline((FuseRmsNorm(min_width=8),)) and Pipeline.parse(str(pipeline)) == pipeline
    program = captured(SPELLINGS["square"])
    [remark] = fuse(program, FuseRmsNorm(min_width=8)).remarks
    assert "7 elements, fewer than min-width=8" in remark.message
    assert fuse(program, FuseRmsNorm(min_width=7)).modified


def test_the_printed_program_runs_and_prints_the_captures_checksums(tmp_path: Path) -> None:
    program = captured(SPELLINGS["state"])
    run_pipeline(program, default_pipeline(CONFIG), PassContext(CONFIG), [DumpPasses(tmp_path)])
    printed: list[dict[str, list[float]]] = []
    for name in ("000-capture.py", "002-fuse-rms-norm.py"):
        ran = subprocess.run([sys.executable, str(tmp_path / name)], capture_output=True, text=True, check=True)
        lines = [line.split() for line in ran.stdout.splitlines()]
        printed.append({line[0]: [float(number) for number in line[1:]] for line in lines})
    assert printed[0].keys() == printed[1].keys() and len(printed[0]) == 2
    for name, numbers in printed[0].items():
        assert printed[1][name] == pytest.approx(numbers, rel=1e-5, abs=1e-5 * numbers[1])
    [line] = [json.loads(line) for line in (tmp_path / "remarks.jsonl").read_text().splitlines() if "fuse-rms" in line]
    assert line["kind"] == "passed"
