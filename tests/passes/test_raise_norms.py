"""``raise-norms``: the forms that it finds, what they compute, and what it leaves."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kimigraph.passes import PassContext, Pipeline, run_pipeline
from kimigraph.passes.raise_norms import RaiseNorms

NORM = torch.ops.kimigraph.rms_norm.default
ATEN = torch.ops.aten


def scale(x: Tensor) -> Tensor:
    return torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)


def last(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    return (wide * scale(wide) * weight.float()).to(x.dtype)


def first(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + 1e-5)).to(x.dtype)


def unweighted(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    return (scale(wide) * wide).to(x.dtype) + weight.sum()


def slice_of(x: Tensor, weight: Tensor) -> Tensor:
    return last(x[..., 1 : 1 + weight.shape[0]], weight)


FORMS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], bool, bool]] = {
    "one rounding": (last, True, False),
    "rounded before the weight": (first, True, True),
    "no weight": (unweighted, False, False),
    "of a slice": (slice_of, True, False),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_found_and_keeps_every_bit(
    form: str, dtype: torch.dtype, trace: Any, run: Any, count: Any, context: PassContext
) -> None:
    torch.manual_seed(0)
    function, weighted, rounds_first = FORMS[form]
    tensors = torch.randn(2, 3, 8 if form != "of a slice" else 11).to(dtype), torch.randn(8).to(dtype)
    program = trace(function, *tensors)
    wanted = run(program, *tensors)
    run_pipeline(program, Pipeline((RaiseNorms(),)), context)
    graph = program.graph_module.graph
    assert count(graph, NORM) == 1 and count(graph, ATEN.rsqrt.default) == 0
    [node] = [node for node in graph.nodes if node.target is NORM]
    assert (node.args[1] is not None) == weighted
    assert node.kwargs["rounds_first"] == (rounds_first and dtype is not torch.float32)
    found = run(program, *tensors)
    assert torch.equal(found[0][0], wanted[0][0])


@pytest.mark.parametrize("returned", [True, False])
def test_a_sum_goes_along_when_it_is_for_the_norm_alone(
    returned: bool, trace: Any, run: Any, count: Any, context: PassContext
) -> None:
    def function(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        total = x + residual
        return (last(total, weight), total) if returned else (last(total, weight),)

    tensors = [torch.randn(4, 8).bfloat16(), torch.randn(4, 8).bfloat16(), torch.randn(8).bfloat16()]
    program = trace(function, *tensors)
    wanted = run(program, *tensors)
    run_pipeline(program, Pipeline((RaiseNorms(),)), context)
    graph = program.graph_module.graph
    assert count(graph, ATEN.add.Tensor) == int(returned) and count(graph, NORM) == 1
    for new, old in zip(run(program, *tensors)[0], wanted[0], strict=True):
        assert torch.equal(new, old)


def near_eps_after(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    return (wide * (torch.rsqrt(wide.square().mean(-1, keepdim=True)) + 1e-5) * weight).to(x.dtype)


def over_rows(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(0, keepdim=True) + 1e-5)).to(x.dtype) + weight


def of_another(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    return (wide.tanh() * scale(wide) * weight).to(x.dtype)


def per_row(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    return (wide * scale(wide) * weight.float().sum().expand(x.shape)).to(x.dtype)


@pytest.mark.parametrize("function", [near_eps_after, over_rows, of_another])
def test_what_only_looks_like_one_stays(function: Any, trace: Any, count: Any, context: PassContext) -> None:
    program = trace(function, torch.randn(8, 8).bfloat16(), torch.randn(8))
    before = str(program.graph_module.graph)
    run_pipeline(program, Pipeline((RaiseNorms(),)), context)
    assert str(program.graph_module.graph) == before and count(program.graph_module.graph, NORM) == 0


def test_a_factor_that_is_no_weight_stays_outside(trace: Any, run: Any, count: Any, context: PassContext) -> None:
    tensors = torch.randn(8, 8), torch.randn(8)
    program = trace(per_row, *tensors)
    wanted = run(program, *tensors)
    run_pipeline(program, Pipeline((RaiseNorms(),)), context)
    assert count(program.graph_module.graph, NORM) == 1
    assert torch.equal(run(program, *tensors)[0][0], wanted[0][0])


def test_the_reason_is_told(trace: Any, context: PassContext) -> None:
    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        root = scale(x)
        return x * root, root

    program = trace(function, torch.randn(4, 8))
    [record] = run_pipeline(program, Pipeline((RaiseNorms(),)), context)
    [remark] = record.result.remarks
    assert remark.kind == "missed" and "is used elsewhere, by output" in remark.message and remark.remedy


def test_a_weight_that_is_written_after_its_cast_refuses(trace: Any, run: Any, context: PassContext) -> None:
    def function(x: Tensor, weight: Tensor) -> Tensor:
        wide, factor = x.float(), weight.float()
        weight.mul_(0.5)
        return (wide * scale(wide) * factor).to(x.dtype)

    tensors = torch.randn(2, 8).bfloat16(), torch.randn(8).bfloat16()
    program = trace(function, *tensors)
    wanted = run(program, *tensors)
    [record] = run_pipeline(program, Pipeline((RaiseNorms(),)), context)
    assert torch.equal(run(program, *tensors)[0][0], wanted[0][0])
    assert any("is written between its use" in remark.message for remark in record.result.remarks)
