"""``merge-horizontal`` on products of few rows with weights of several types: one region, the same numbers."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kimigraph.codegen.horizontal import build_region
from kimigraph.codegen.preparation import prepared
from kimigraph.ir.launches import graph_launches
from kimigraph.ir.preparation import prepare
from kimigraph.ir.purity import region_module
from kimigraph.ir.row_products import row_products
from kimigraph.ir.verifier import verify
from kimigraph.passes import PassContext, Pipeline, run_pipeline
from kimigraph.passes.merge_horizontal import MergeHorizontal

BF16 = torch.bfloat16


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape) + 1000 * len(shape))
    return torch.randn(*shape, generator=generator).to(dtype)


def merge(program: Any, context: PassContext) -> Any:
    (record,) = run_pipeline(program, Pipeline((MergeHorizontal(),)), context)
    verify(program)
    return record.result


def regions(program: Any) -> list[Any]:
    return [node for node in program.graph_module.graph.nodes if node.op == "call_module"]


def mixed(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Two 16-bit products and a 32-bit one of the same rows, as a DSA layer has them."""
    return F.linear(x, a).relu(), F.linear(x, b).relu(), F.linear(x.float(), c) * 0.5


def mixed_inputs(rows: int) -> list[torch.Tensor]:
    return [draw(rows, 1, 32, dtype=BF16), draw(8, 32, dtype=BF16), draw(16, 32, dtype=BF16), draw(6, 32)]


@pytest.mark.parametrize("rows", [1, 3, 8])
def test_types_meet_in_one_kernel(weighted: Any, run_all: Any, context: PassContext, rows: int) -> None:
    inputs = mixed_inputs(rows)
    program = weighted(mixed, *inputs, weights=3)
    assert graph_launches(program.graph_module.graph) == 7  # three products, a cast, three pointwise operations
    wanted = run_all(program, *inputs)
    result = merge(program, context)
    assert graph_launches(program.graph_module.graph) == 4 and result.statistics["merged"] == 2
    [region] = regions(program)
    assert region.meta["region"] == "horizontal"
    child = region_module(region)
    assert child is not None and len(row_products(child) or []) == 2
    build_region(child)  # and it has a kernel
    for old, new in zip(wanted, run_all(program, *inputs), strict=True):
        torch.testing.assert_close(new, old, rtol=1e-2, atol=1e-2)


def test_the_remark_has_both_prices(weighted: Any, context: PassContext) -> None:
    result = merge(weighted(mixed, *mixed_inputs(1), weights=3), context)
    remark = result.remarks[-1]
    assert remark.kind == "passed" and "horizontal_0" in remark.message
    assert "us apart" in remark.message and "1 launch) together on NVIDIA H200" in remark.message


def test_more_rows_are_left_to_the_library(weighted: Any, context: PassContext) -> None:
    program = weighted(mixed, *mixed_inputs(9), weights=3)
    merge(program, context)
    assert regions(program) == []


def test_a_wide_weight_of_32_bits_with_several_rows_is_left_out(weighted: Any, context: PassContext) -> None:
    inputs = [*mixed_inputs(2)[:3], draw(516, 32)]
    program = weighted(mixed, *inputs, weights=3)
    merge(program, context)
    assert regions(program) == []


def test_a_product_with_its_cast_alone_becomes_one_kernel(weighted: Any, run_all: Any, context: PassContext) -> None:
    inputs = [draw(1, 32, dtype=BF16), draw(6, 32)]
    program = weighted(lambda x, w: F.linear(x.float(), w) * 2, *inputs, weights=1)
    wanted = run_all(program, *inputs)
    merge(program, context)
    assert len(regions(program)) == 1 and graph_launches(program.graph_module.graph) == 2
    assert all(torch.equal(old, new) for old, new in zip(wanted, run_all(program, *inputs), strict=True))


def test_a_cast_that_something_else_reads_stays_for_it(weighted: Any, run_all: Any, context: PassContext) -> None:
    inputs = [draw(1, 32, dtype=BF16), draw(8, 32, dtype=BF16), draw(6, 32)]

    def step(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        wide = x.float()
        return F.linear(x, a).relu(), F.linear(wide, b) * 2, wide.sum()

    program = weighted(step, *inputs, weights=2)
    wanted = run_all(program, *inputs)
    merge(program, context)
    assert len(regions(program)) == 1
    for old, new in zip(wanted, run_all(program, *inputs), strict=True):
        torch.testing.assert_close(new, old, rtol=1e-2, atol=1e-2)


def test_results_of_a_kernel_may_be_returned_and_written(weighted: Any, run_all: Any, context: PassContext) -> None:
    """Each has memory of its own there, unlike columns of one product."""
    inputs = [draw(1, 32, dtype=BF16), draw(8, 32, dtype=BF16), draw(6, 32)]

    def step(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        wide = F.linear(x.float(), b)
        wide.add_(1)
        return F.linear(x, a), wide

    program = weighted(step, *inputs, weights=2)
    wanted = run_all(program, *inputs)
    merge(program, context)
    assert len(regions(program)) == 1
    assert all(torch.equal(old, new) for old, new in zip(wanted, run_all(program, *inputs), strict=True))


def cast_before_the_write(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
    wide = x.float()
    x.add_(1)
    return F.linear(wide, a) + 1, F.linear(wide, b) * 2


def casts_around_the_write(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
    wide = x.float()
    x.add_(1)
    return F.linear(wide, a) + 1, F.linear(x.float(), b) * 2


@pytest.mark.parametrize("step", [cast_before_the_write, casts_around_the_write], ids=lambda step: step.__name__)
def test_rows_that_are_written_after_their_cast_keep_it(
    step: Any, weighted: Any, run_all: Any, context: PassContext
) -> None:
    inputs = [draw(2, 32, dtype=BF16), draw(6, 32), draw(6, 32)]
    program = weighted(step, *inputs, weights=2)
    wanted = run_all(program, *inputs)
    merge(program, context)
    for old, new in zip(wanted, run_all(program, *inputs), strict=True):
        torch.testing.assert_close(new, old, rtol=1e-5, atol=1e-5)


def test_a_product_of_a_product_stays_apart(weighted: Any, context: PassContext) -> None:
    inputs = [draw(1, 32, dtype=BF16), draw(32, 32, dtype=BF16), draw(6, 32)]
    program = weighted(lambda x, a, b: F.linear(F.linear(x, a).float(), b) * 2, *inputs, weights=2)
    merge(program, context)
    [region] = regions(program)  # the cast and the second product, without the first
    child = region_module(region)
    assert child is not None and len(row_products(child) or []) == 1


STEPS = st.lists(
    st.tuples(st.sampled_from(("bf16", "bf16", "fp32", "fp32", "add", "write")), st.integers(0, 6), st.integers(0, 3)),
    min_size=2,
    max_size=8,
)


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=STEPS)
def test_random_programs_compute_the_same(
    steps: list[tuple[str, int, int]], weighted: Any, run_all: Any, context: PassContext
) -> None:
    """Integers small enough that both types are exact, so that every order of sums gives the same bits."""
    generator = torch.Generator().manual_seed(0)

    def whole(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.randint(-1, 2, shape, generator=generator).to(dtype)

    inputs = [whole(2, 8, dtype=BF16), whole(2, 8, dtype=BF16)]
    inputs += [whole(8, 8, dtype=dtype) for dtype in (BF16, torch.float32) for _ in range(4)]

    def step(x: torch.Tensor, y: torch.Tensor, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        values = [x, y]
        for kind, left, right in steps:
            value, other = values[left % len(values)], values[right % len(values)]
            if kind == "bf16":
                values.append(F.linear(value, weights[right]).sign())
            elif kind == "fp32":
                values.append(F.linear(value.float(), weights[4 + right]).sign().to(BF16))
            elif kind == "add":
                values.append((value + other).sign())
            else:
                value.neg_()
        return tuple(value + 1 for value in values[2:]) or (x + 1,)

    program = weighted(step, *inputs, weights=8)
    wanted = run_all(program, *inputs)
    merge(program, context)
    for old, new in zip(wanted, run_all(program, *inputs), strict=True):
        assert torch.equal(old, new)


def test_a_cast_of_a_weight_that_a_kernel_takes_happens_when_the_program_is_bound(
    weighted: Any, run_all: Any, context: PassContext
) -> None:
    inputs = [draw(16, 32), draw(8, 32, dtype=BF16), draw(32, dtype=BF16)]
    program = weighted(lambda x, a, b: F.linear(x, a.float()) * b.float().sum(), *inputs, weights=2)
    wanted = run_all(program, *inputs)
    result = merge(program, context)
    assert [remark.kind for remark in result.remarks] == ["note"] and not result.modified
    ready = prepared(program)
    [(name, [step])] = ready.steps.items()
    assert name == "model.a_1 as float32" and step == {"op": "cast", "dtype": "float32", "of": ["model.a_1"]}
    assert [spec.source for spec in ready.sources] == ["model.a_1"]
    verify(ready.program)
    given = [
        prepare(ready.steps[s.source], {"model.a_1": inputs[1]}) if s.source == name else None
        for s in ready.program.inputs
    ]
    tensors = [
        t if t is not None else inputs[0] if s.kind == "input" else inputs[2]
        for t, s in zip(given, ready.program.inputs, strict=True)
    ]
    assert torch.equal(run_all(ready.program, *tensors)[0], wanted[0])
