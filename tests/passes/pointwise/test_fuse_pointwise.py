"""``fuse-pointwise``: what becomes a region, what stays apart, and the order of reads and writes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Graph, Node

from kimigraph.ir.launches import graph_launches, launches_of
from kimigraph.ir.program import CapturedProgram
from kimigraph.ir.purity import mutated_arguments, region_module
from kimigraph.passes import PassContext, Pipeline, run_pipeline
from kimigraph.passes.fuse_pointwise import FusePointwise

ATEN = torch.ops.aten


def regions(graph: Graph) -> list[Node]:
    return [node for node in graph.nodes if node.op == "call_module"]


@pytest.fixture
def fuse(trace: Any, run: Any, context: PassContext) -> Callable[..., CapturedProgram]:
    """Fuse a function and hold the result, inputs included, to every bit of the function itself."""

    def fused(function: Callable[..., Any], *tensors: Tensor, **options: Any) -> CapturedProgram:
        program = trace(function, *tensors)
        run_pipeline(program, Pipeline((FusePointwise(**options),)), context)
        eager = [tensor.clone() for tensor in tensors]
        results = function(*eager)
        wanted = [*(results if isinstance(results, tuple) else (results,)), *eager]
        found = run(program, *tensors)
        for new, old in zip([*found[0], *found[1]], wanted, strict=True):
            assert torch.equal(new, old)
        return program

    return fused


def test_a_chain_is_one_region_that_says_what_it_replaces(fuse: Any) -> None:
    program = fuse(lambda x, y: torch.sigmoid(x * 2 + y).bfloat16(), torch.randn(4, 6), torch.randn(6))
    [call] = regions(program.graph_module.graph)
    assert call.meta["region"] == "pointwise" and call.meta["val"].dtype is torch.bfloat16
    assert call.meta["replaces"] == ("mul", "add", "sigmoid", "_to_copy")
    child = region_module(call)
    assert child is not None and sum(launches_of(node) for node in child.graph.nodes) == 4


def test_products_part_regions_and_keep_what_both_sides_need(fuse: Any) -> None:
    def function(x: Tensor, weight: Tensor) -> Tensor:
        wide = torch.tanh(x).exp()
        return (wide @ weight).relu() + wide * 3

    program = fuse(function, torch.randn(16, 4), torch.randn(4, 4))
    graph = program.graph_module.graph
    assert len(regions(graph)) == 2 and graph_launches(graph) == 3


def test_a_region_may_have_results_of_several_types_and_shapes(fuse: Any) -> None:
    def function(x: Tensor) -> tuple[Tensor, ...]:
        peak = x.amax(-1, keepdim=True)
        shifted = (x - peak).exp()
        return shifted, peak.squeeze(-1), shifted.reshape(2, -1).bfloat16()

    program = fuse(function, torch.randn(4, 6))
    assert graph_launches(program.graph_module.graph) == 1


def test_reductions_over_other_extents_stay_apart(fuse: Any) -> None:
    program = fuse(lambda x: torch.softmax(x.sum(-1) * 2, 0) + 1, torch.randn(4, 6))
    assert graph_launches(program.graph_module.graph) == 2


def test_a_view_that_is_used_outside_is_made_there_again(fuse: Any) -> None:
    def function(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        rows = (x * 2).view(24, 4)
        return rows @ weight, (rows.t() + 1).relu()

    program = fuse(function, torch.randn(16, 6), torch.randn(4, 4))
    [call] = regions(program.graph_module.graph)
    assert [tuple(value.shape) for value in call.meta["val"]] == [(16, 6), (4, 24)]


def test_two_equal_results_are_two_tensors(fuse: Any) -> None:
    program = fuse(lambda x: ((x * 2).relu(), (x * 2).relu()), torch.randn(4, 6))
    first, second = program.graph_module(torch.randn(4, 6))
    assert first.data_ptr() != second.data_ptr()


def test_casts_between_are_kept(fuse: Any) -> None:
    """A bf16 quotient equals its own maximum, as many times as eager says."""

    def function(x: Tensor) -> Tensor:
        third = x / 3
        return (third == third.amax(-1, keepdim=True)).sum(-1)

    program = fuse(function, torch.randn(8, 40).bfloat16())
    assert graph_launches(program.graph_module.graph) == 1


# Order of reads and writes


def scattered_then_zeroed(x: Tensor, y: Tensor) -> Tensor:
    out = torch.slice_scatter(x, y[:, :2], 1, 1, 3) * 1.0
    x.zero_()
    return out


def bits_before_a_write(x: Tensor, y: Tensor) -> Tensor:
    bits = x.view(torch.int32) * 2
    x[:, 2:] = 2.0
    return bits + y.to(torch.int32)


def read_between_writes(x: Tensor, y: Tensor) -> Tensor:
    x.add_(1)
    first = x * y
    x.mul_(2)
    return first + x


def write_through_views(x: Tensor, y: Tensor) -> Tensor:
    x[:, :2].copy_(y[:, 2:])
    x[0].mul_(3)
    return x.sum(-1, keepdim=True) + y


def overlapping(x: Tensor, y: Tensor) -> Tensor:
    x[:, 1:].copy_(x[:, :-1] * 2)
    return x + y


def own_result_written(x: Tensor, y: Tensor) -> Tensor:
    total = x + y
    before = total * 2
    total.mul_(0)
    return before + total


def turned_and_written(x: Tensor, y: Tensor) -> Tensor:
    x.copy_(x.t() + y)
    return x * 2


ORDERS = (
    scattered_then_zeroed,
    bits_before_a_write,
    read_between_writes,
    write_through_views,
    overlapping,
    own_result_written,
    turned_and_written,
)


@pytest.mark.parametrize("function", ORDERS, ids=lambda function: function.__name__)
def test_reads_and_writes_keep_their_order(function: Any, fuse: Any) -> None:
    fuse(function, torch.randn(4, 4), torch.randn(4, 4))


def test_a_write_joins_what_reads_the_old_values(fuse: Any) -> None:
    def function(state: Tensor, x: Tensor) -> Tensor:
        new = state * 0.9 + x
        state.copy_(new)
        return torch.tanh(new)

    program = fuse(function, torch.randn(4, 6), torch.randn(4, 6))
    [call] = regions(program.graph_module.graph)
    assert graph_launches(program.graph_module.graph) == 1 and mutated_arguments(call)


def test_a_write_through_another_view_stays_apart_and_says_why(trace: Any, context: PassContext) -> None:
    program = trace(turned_and_written, torch.randn(4, 4), torch.randn(4, 4))
    [record] = run_pipeline(program, Pipeline((FusePointwise(),)), context)
    missed = [remark for remark in record.result.remarks if remark.kind == "missed"]
    assert missed and "what is written is read in another way" in missed[0].message and missed[0].remedy


def test_what_the_cost_model_says_is_in_the_remark(trace: Any, context: PassContext) -> None:
    program = trace(lambda x: (x * 2).relu(), torch.randn(64, 64))
    [record] = run_pipeline(program, Pipeline((FusePointwise(),)), context)
    [remark] = record.result.remarks
    assert remark.kind == "passed" and "1 launches and 32,768 bytes fewer" in remark.message
    assert "us instead of" in remark.message


def test_the_largest_region_is_an_option(fuse: Any) -> None:
    def function(x: Tensor) -> Tensor:
        for _ in range(10):
            x = torch.tanh(x)
        return x

    whole = fuse(function, torch.randn(4)).graph_module.graph
    parts = fuse(function, torch.randn(4), most=5).graph_module.graph
    assert len(regions(whole)) == 1 and len(regions(parts)) == 2


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (x[:0] * 2).relu(),
        lambda x: (x.double() * 2).relu(),
        lambda x: torch.cumsum(x * 1, 0),
        lambda x: x.t().contiguous(),
    ],
    ids=["no elements", "fp64", "no rule", "one node"],
)
def test_what_is_no_kernel_stays(function: Any, trace: Any, context: PassContext) -> None:
    program = trace(function, torch.randn(4, 6))
    before = str(program.graph_module.graph)
    run_pipeline(program, Pipeline((FusePointwise(),)), context)
    assert str(program.graph_module.graph) == before


def test_layers_one_after_the_other_take_linear_time(trace: Any, context: PassContext) -> None:
    """The order of a long program is not searched anew for every region."""

    def function(x: Tensor, weight: Tensor) -> Tensor:
        for _ in range(120):
            x = torch.tanh(x @ weight) * 0.5 + x
        return x

    program = trace(function, torch.randn(4, 4), torch.randn(4, 4))
    [record] = run_pipeline(program, Pipeline((FusePointwise(),)), context)
    assert len(regions(program.graph_module.graph)) == 120 and record.seconds < 5


@pytest.mark.parametrize("exponent", [2, 2.5], ids=str)
def test_a_power_without_a_kernel_stays_apart(exponent: float, fuse: Any) -> None:
    """Of whole numbers, or of an exponent that is no few products."""
    x = torch.arange(6) if exponent == 2 else torch.rand(6)
    program = fuse(lambda x: x**exponent + 1, x)
    assert regions(program.graph_module.graph) == []


def test_a_number_raised_to_a_tensor_stays_apart(fuse: Callable[..., CapturedProgram]) -> None:
    """``theta ** -exponents`` of rotary positions: no kernel has it, and what surrounds it still fuses."""

    def angles(x: Tensor) -> Tensor:
        return (10000.0 ** -(x.sin() * 2.0)).cos() * 3.0

    program = fuse(angles, torch.rand(4, 8))
    names = [str(node.target) for node in program.graph_module.graph.nodes if node.op == "call_function"]
    assert any("aten.pow.Scalar" in name for name in names) and len(regions(program.graph_module.graph)) == 2
