"""``--verify --reference onnxruntime``: onnxruntime computes the captured graph in place of the eager model."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kimigraph
from kimigraph.codegen.onnx.model import TABLE
from kimigraph.ir.errors import CompileError, NumericsError, UsageError


class Step(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(8, 8)
        self.register_buffer("steps", torch.zeros(1))

    def forward(self, x: Tensor, cache: dict[str, Tensor]) -> Tensor:
        cache["last"].copy_(torch.tanh(self.project(x)))
        self.steps.add_(1)
        return cache["last"] + self.steps.to(x.dtype)


CONFIG = kimigraph.CompileConfig(target="cpu:reference", verify=True, reference="onnxruntime", cache="off")


def inputs(dtype: torch.dtype = torch.float32) -> tuple[Any, ...]:
    return torch.ones(2, 8, dtype=dtype), {"last": torch.zeros(2, 8, dtype=dtype)}


def test_a_program_is_verified_and_the_report_names_the_reference() -> None:
    torch.manual_seed(0)
    compiled = kimigraph.optimize(Step().eval(), inputs(), CONFIG)
    verify = compiled.report().verify
    assert verify is not None and verify["reference"] == "onnxruntime" and verify["passed"]


def test_a_difference_is_found_and_names_onnxruntime(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TABLE, "tanh", TABLE["sigmoid"])
    with pytest.raises(NumericsError, match=r"captured graph against onnxruntime: (output|cache)"):
        kimigraph.optimize(Step().eval(), inputs(), CONFIG)


def test_what_onnxruntime_cannot_compute_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="no 16-bit products"):
        kimigraph.optimize(Step().bfloat16().eval(), inputs(torch.bfloat16), CONFIG)
    monkeypatch.delitem(TABLE, "tanh")
    with pytest.raises(CompileError, match=r"no translation to ONNX. aten.tanh"):
        kimigraph.optimize(Step().eval(), inputs(), CONFIG)


def test_a_reference_that_nothing_is_compared_with_is_refused() -> None:
    config = kimigraph.CompileConfig(target="cpu:reference", reference="onnxruntime", cache="off")
    with pytest.raises(UsageError, match="add --verify, or leave it out"):
        kimigraph.optimize(Step().eval(), inputs(), config)
