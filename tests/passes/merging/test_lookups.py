"""Rows of a table, their norm and the product that reads it alone become one kernel."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from kimigraph.codegen.horizontal import build_region
from kimigraph.ir.launches import graph_launches
from kimigraph.ir.operators import OPERATORS
from kimigraph.ir.purity import region_module
from kimigraph.ir.verifier import verify
from kimigraph.passes import PassContext, Pipeline, run_pipeline

NORM = OPERATORS["rms_norm"].overload
LINEAR = torch.nn.functional.linear


def tensors(rows: int, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    """Places, something of the rows' shape, then weights: table, norm, product."""
    generator = torch.Generator().manual_seed(rows)
    places = torch.randint(0, 11, (rows, 1), generator=generator)
    sizes = ((rows, 1, 64), (11, 64), (64,), (48, 64))
    return [places, *(torch.randn(size, generator=generator).to(dtype) for size in sizes)]


def way_in(places: Any, other: Any, table: Any, norm: Any, weight: Any) -> Any:
    found = torch.nn.functional.embedding(places, table)
    return LINEAR(NORM(found, norm, eps=1e-5), weight), found + other


def norm_used_twice(places: Any, other: Any, table: Any, norm: Any, weight: Any) -> Any:
    normed = NORM(torch.nn.functional.embedding(places, table), norm, eps=1e-5)
    return LINEAR(normed, weight), normed + other


def rows_written_in_between(places: Any, other: Any, table: Any, norm: Any, weight: Any) -> Any:
    found = torch.nn.functional.embedding(places, table)
    normed = NORM(found, norm, eps=1e-5)
    found.add_(other)
    return LINEAR(normed, weight), found * 1


def rows_written_before(places: Any, other: Any, table: Any, norm: Any, weight: Any) -> Any:
    found = torch.nn.functional.embedding(places, table)
    found.add_(other)
    return LINEAR(NORM(found, norm, eps=1e-5), weight), found * 1


def a_sum_in_the_norm(places: Any, other: Any, table: Any, norm: Any, weight: Any) -> Any:
    return LINEAR(NORM(torch.nn.functional.embedding(places, table), norm, other, eps=1e-5), weight), other * 1


def regions(program: Any, context: PassContext) -> list[Any]:
    run_pipeline(program, Pipeline.parse("merge-horizontal"), context)
    verify(program)
    return [node for node in program.graph_module.graph.nodes if node.meta.get("region") == "horizontal"]


def test_the_way_into_a_decoder_is_one_launch(weighted: Any, run_all: Any, context: PassContext) -> None:
    """The rows themselves stay a result; every bit is the same."""
    inputs = tensors(8)
    program = weighted(way_in, *inputs, weights=3)
    wanted, before = run_all(program, *inputs), graph_launches(program.graph_module.graph)
    [call] = regions(program, context)
    assert graph_launches(program.graph_module.graph) == before - 2
    child = region_module(call)
    assert child is not None and build_region(child).launches[0].function == "normed_lookup_dot"
    for old, new in zip(wanted, run_all(program, *inputs), strict=True):
        assert torch.equal(old, new)


@pytest.mark.parametrize("function", [norm_used_twice, rows_written_in_between, rows_written_before, a_sum_in_the_norm])
def test_what_stays_apart(function: Any, weighted: Any, run_all: Any, context: PassContext) -> None:
    inputs = tensors(4)
    program = weighted(function, *inputs, weights=3)
    wanted = run_all(program, *inputs)
    assert not regions(program, context)
    for old, new in zip(wanted, run_all(program, *inputs), strict=True):
        assert torch.equal(old, new)


@pytest.mark.parametrize(("rows", "dtype"), [(1, torch.bfloat16), (9, torch.bfloat16), (4, torch.float32)])
def test_one_row_many_rows_and_wide_ones_stay(
    rows: int, dtype: torch.dtype, weighted: Any, context: PassContext
) -> None:
    """One row is prepared by the kernel of its product; many are a library's; matrix units take 16 bits."""
    assert not regions(weighted(way_in, *tensors(rows, dtype), weights=3), context)


@pytest.mark.parametrize(("signal", "pays"), [(1e-7, True), (5e-6, False), (0.0, True)])
def test_a_wait_that_costs_as_much_as_a_launch_does_not_pay(
    signal: float, pays: bool, weighted: Any, context: PassContext
) -> None:
    """Together, programs wait for the normed rows; without a figure as long as one kernel for another."""
    fast = {"bytes_per_second": 1e15, "launch_seconds": 1e-6, "latency_seconds": 1e-6, "signal_seconds": signal}
    device = replace(context.device, **fast)
    program = weighted(way_in, *tensors(8), weights=3)
    given = replace(context, config=replace(context.config, device=device.text()))
    records = run_pipeline(program, Pipeline.parse("merge-horizontal"), given)
    [told] = [remark for remark in records[-1].result.remarks if "us apart" in remark.message]
    assert told.kind == ("passed" if pays else "missed")
    assert f"with {device.wait_seconds * 1e6:.2f} us until all programs see the normed rows" in told.message
    assert any(node.meta.get("region") for node in program.graph_module.graph.nodes) == pays
