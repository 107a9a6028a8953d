"""``merge-horizontal`` on products: what merges, what does not and why, and that results stay."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kimigraph.codegen.preparation import prepared
from kimigraph.ir.launches import graph_launches
from kimigraph.ir.verifier import verify
from kimigraph.passes import PassContext, Pipeline, run_pipeline
from kimigraph.passes.merge_horizontal import MergeHorizontal

ATEN = torch.ops.aten
F64 = torch.float64


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape) + 1000 * len(shape))
    return torch.randn(shape, generator=generator, dtype=F64).to(dtype)


def merge(program: Any, context: PassContext) -> Any:
    (record,) = run_pipeline(program, Pipeline((MergeHorizontal(),)), context)
    verify(program)
    return record.result


def product_count(program: Any) -> int:
    return sum(
        node.target in (ATEN.mm.default, ATEN.linear.default, ATEN.matmul.default)
        for node in program.graph_module.graph.nodes
    )


def missed(result: Any) -> list[str]:
    return [remark.message for remark in result.remarks if remark.kind == "missed"]


def test_products_of_the_same_rows_become_one(weighted: Any, run_all: Any, context: PassContext) -> None:
    inputs = [draw(2, 1, 16), draw(8, 16), draw(4, 16), draw(12, 16)]
    program = weighted(
        lambda x, a, b, c: (F.linear(x, a) + 1, F.linear(x, b) * 2, F.linear(x, c) - 1), *inputs, weights=3
    )
    wanted = run_all(program, *inputs)
    result = merge(program, context)
    assert product_count(program) == 1 and result.statistics["merged"] == 1
    for old, new in zip(wanted, run_all(program, *inputs), strict=True):
        torch.testing.assert_close(new, old, rtol=1e-6, atol=1e-6)


def test_the_remark_has_both_prices_and_the_device(weighted: Any, context: PassContext) -> None:
    program = weighted(
        lambda x, a, b: (F.linear(x, a) + 1, F.linear(x, b) + 1), draw(1, 16), draw(8, 16), draw(4, 16), weights=2
    )
    [remark] = merge(program, context).remarks
    assert (
        remark.kind == "passed"
        and "us apart" in remark.message
        and "1 launch) together on NVIDIA H200" in remark.message
    )
    assert len(remark.nodes) == 3


def test_the_concatenation_happens_when_the_program_is_bound(weighted: Any, run_all: Any, context: PassContext) -> None:
    inputs = [draw(2, 16), draw(8, 16), draw(4, 16)]
    program = weighted(lambda x, a, b: (F.linear(x, a) + 1, F.linear(x, b) + 1), *inputs, weights=2)
    merge(program, context)
    assert graph_launches(program.graph_module.graph) == 3  # one product, two additions
    ready = prepared(program)
    assert [spec.kind for spec in ready.program.inputs] == ["input", "weight"]
    [(name, [step])] = ready.steps.items()
    assert name == "model.a_1+b_1" and step == {"op": "cat", "dim": 0, "of": ["model.a_1", "model.b_1"]}
    assert [spec.source for spec in ready.sources] == ["model.a_1", "model.b_1"]
    assert ready.program.inputs[1].shape == (12, 16)
    verify(ready.program)
    wanted = run_all(program, *inputs)[:2]
    found = run_all(ready.program, inputs[0], torch.cat(inputs[1:]))[:2]
    assert all(torch.equal(old, new) for old, new in zip(wanted, found, strict=True))
    assert len(program.inputs) == 3  # the program given stays as it was


def test_a_weight_that_something_else_reads_stays_an_input(weighted: Any, context: PassContext) -> None:
    inputs = [draw(2, 16), draw(8, 16), draw(4, 16)]
    program = weighted(lambda x, a, b: (F.linear(x, a) + 1, F.linear(x, b) + 1, a.sum()), *inputs, weights=2)
    merge(program, context)
    ready = prepared(program)
    assert [spec.source for spec in ready.sources] == ["model.b_1"]
    assert [spec.source for spec in ready.program.inputs] == ["model.x_1", "model.a_1+b_1", "model.a_1"]


def test_a_concatenation_of_results_becomes_a_slice(weighted: Any, run_all: Any, context: PassContext) -> None:
    inputs = [draw(2, 16), draw(8, 16), draw(4, 16), draw(12, 16)]

    def step(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> tuple[torch.Tensor, ...]:
        left, middle, right = F.linear(x, a), F.linear(x, b), F.linear(x, c)
        return torch.cat([right, left], -1) + 1, middle + 1

    program = weighted(step, *inputs, weights=3)
    wanted = run_all(program, *inputs)
    merge(program, context)
    assert not any(
        node.target is ATEN.cat.default and not node.meta.get("prepared") for node in program.graph_module.graph.nodes
    )
    assert graph_launches(program.graph_module.graph) == 3
    for old, new in zip(wanted, run_all(program, *inputs), strict=True):
        torch.testing.assert_close(new, old, rtol=1e-6, atol=1e-6)


def test_rows_in_other_groupings_are_the_same_rows(weighted: Any, run_all: Any, context: PassContext) -> None:
    inputs = [draw(2, 1, 16), draw(8, 16), draw(4, 16)]
    program = weighted(lambda x, a, b: (F.linear(x, a) + 1, F.linear(x.view(2, 16), b) + 1), *inputs, weights=2)
    wanted = run_all(program, *inputs)
    merge(program, context)
    assert product_count(program) == 1
    for old, new in zip(wanted, run_all(program, *inputs), strict=True):
        assert old.shape == new.shape
        torch.testing.assert_close(new, old, rtol=1e-6, atol=1e-6)


def test_weights_that_stand_upright_merge_by_columns(weighted: Any, run_all: Any, context: PassContext) -> None:
    inputs = [draw(2, 16), draw(16, 8), draw(16, 4)]
    program = weighted(lambda x, a, b: (x @ a + 1, x @ b + 1), *inputs, weights=2)
    wanted = run_all(program, *inputs)
    merge(program, context)
    assert product_count(program) == 1
    for old, new in zip(wanted, run_all(program, *inputs), strict=True):
        torch.testing.assert_close(new, old, rtol=1e-6, atol=1e-6)


def test_types_are_not_mixed(weighted: Any, context: PassContext) -> None:
    bf16 = torch.bfloat16
    inputs = [draw(16, 16, dtype=bf16), draw(8, 16, dtype=bf16), draw(8, 16)]
    program = weighted(lambda x, a, b: (F.linear(x, a) + 1, F.linear(x.float(), b) + 1), *inputs, weights=2)
    assert not merge(program, context).modified


def test_a_result_that_is_returned_or_written_keeps_its_memory(weighted: Any, context: PassContext) -> None:
    inputs = [draw(16, 16), draw(8, 16), draw(4, 16)]
    returned = weighted(lambda x, a, b: (F.linear(x, a), F.linear(x, b).view(64)), *inputs, weights=2)
    result = merge(returned, context)
    assert not result.modified and all("needs memory of its own" in message for message in missed(result))
    written = weighted(lambda x, a, b: (F.linear(x, a).add_(1).sum(), F.linear(x, b).sum()), *inputs, weights=2)
    assert not merge(written, context).modified


def test_columns_that_would_begin_inside_a_load_stay_apart(weighted: Any, context: PassContext) -> None:
    inputs = [draw(16, 16), draw(3, 16), draw(4, 16), draw(8, 16)]
    program = weighted(
        lambda x, a, b, c: (F.linear(x, a) + 1, F.linear(x, b) + 1, F.linear(x, c) + 1), *inputs, weights=3
    )
    result = merge(program, context)
    assert product_count(program) == 2
    [message] = missed(result)
    assert "no multiple of 16 bytes" in message


def test_a_write_to_the_rows_between_two_products_keeps_them_apart(
    weighted: Any, run_all: Any, context: PassContext
) -> None:
    inputs = [draw(2, 16), draw(8, 16), draw(4, 16)]

    def step(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        first = F.linear(x, a) + 1
        x.mul_(2)
        return first, F.linear(x, b) + 1

    program = weighted(step, *inputs, weights=2)
    # The second product names the rows themselves, not the write's result.
    rows = next(iter(program.graph_module.graph.nodes))
    next(node for node in program.graph_module.graph.nodes if node.target is ATEN.mul_.Tensor).replace_all_uses_with(
        rows
    )
    wanted = run_all(program, *inputs)
    result = merge(program, context)
    assert not result.modified and "waits for" in missed(result)[0]
    assert all(torch.equal(old, new) for old, new in zip(wanted, run_all(program, *inputs), strict=True))


def test_a_copy_that_costs_more_than_the_launch_keeps_a_product_out(weighted: Any, context: PassContext) -> None:
    """Flattening rows of a wide part needs a copy: for many rows that is dearer than a launch."""

    def step(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return F.linear(x, a).view(-1).sin(), F.linear(x, b).sin()

    large = [torch.empty(size, dtype=torch.bfloat16) for size in ((4096, 64), (4096, 64), (4096, 64))]
    result = merge(weighted(step, *large, weights=2), context)
    assert not result.modified and "does not pay" in missed(result)[0]


def test_a_copy_is_made_and_priced_where_it_is_cheaper(weighted: Any, run_all: Any, context: PassContext) -> None:
    inputs = [draw(4, 16), *(draw(8 + 4 * number, 16) for number in range(4))]

    def step(x: torch.Tensor, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return F.linear(x, weights[0]).view(-1).sin(), *(F.linear(x, weight).sin() for weight in weights[1:])

    program = weighted(step, *inputs, weights=4)
    wanted = run_all(program, *inputs)
    merge(program, context)
    assert product_count(program) <= 2
    for old, new in zip(wanted, run_all(program, *inputs), strict=True):
        torch.testing.assert_close(new, old, rtol=1e-6, atol=1e-6)


def test_the_decision_is_the_device_files(weighted: Any, context: PassContext) -> None:
    inputs = [draw(16, 16), draw(8, 16), draw(4, 16)]

    def step(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return F.linear(x, a).view(-1).sin(), F.linear(x, b).sin()

    # One launch saved and one copy made: even, but for the second reading of the rows.
    slow_copies = replace(context.device, bytes_per_second=1e6, launch_seconds=1e-9, latency_seconds=0.0)
    other = PassContext(replace(context.config, device=slow_copies.text()))
    assert not merge(weighted(step, *inputs, weights=2), other).modified


STEPS = st.lists(
    st.tuples(
        st.sampled_from(("product", "product", "product", "add", "write", "cat", "view")),
        st.integers(0, 9),
        st.integers(0, 3),
    ),
    min_size=2,
    max_size=8,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=STEPS)
def test_random_programs_compute_the_same(
    steps: list[tuple[str, int, int]], weighted: Callable[..., Any], run_all: Any, context: PassContext
) -> None:
    """Outputs and updated inputs of random programs of products, views, concatenations and writes, in fp64."""
    inputs = [draw(3, 8, dtype=F64), draw(3, 8, dtype=F64) + 1, *(draw(8, 8, dtype=F64) * (n + 1) for n in range(4))]

    def step(x: torch.Tensor, y: torch.Tensor, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        values = [x, y]
        for kind, left, right in steps:
            value, other = values[left % len(values)], values[right % len(values)]
            if kind == "product":
                values.append(F.linear(value, weights[right]))
            elif kind == "add":
                values.append(value + other.sin())
            elif kind == "write":
                value.mul_(1.5)
            elif kind == "cat":
                values.append(torch.cat([value, other], -1)[:, 4:12].tanh())
            else:
                values.append(value.view(1, 3, 8).transpose(0, 1).reshape(3, 8))
        return tuple(value + 0.5 for value in values[2:]) or (x + 1,)

    program = weighted(step, *inputs, weights=4)
    wanted = run_all(program, *inputs)
    before = product_count(program)
    result = merge(program, context)
    assert product_count(program) <= before - result.statistics["merged"]
    for old, new in zip(wanted, run_all(program, *inputs), strict=True):
        torch.testing.assert_close(new, old, rtol=1e-12, atol=1e-12)
    ready = prepared(program)
    verify(ready.program)


def held(weighted: Any, run_all: Any, context: PassContext, step: Any, inputs: list[torch.Tensor], weights: int) -> Any:
    """The merged program, after outputs, their strides and what inputs hold were compared."""
    program = weighted(step, *inputs, weights=weights)
    program.graph_module.recompile()
    eager = program.graph_module(*(tensor.clone() for tensor in inputs))
    wanted = run_all(program, *inputs)
    merge(program, context)
    for old, new in zip(wanted, run_all(program, *inputs), strict=True):
        torch.testing.assert_close(new, old, rtol=1e-6, atol=1e-6)
    outputs = program.graph_module(*(tensor.clone() for tensor in inputs))
    assert [output.stride() for output in outputs] == [output.stride() for output in eager]
    return program


@pytest.mark.parametrize("shape", [(1,), (), (1, 8)], ids=str)
def test_a_bias_that_is_repeated_stays_apart(
    shape: tuple[int, ...], weighted: Any, run_all: Any, context: PassContext
) -> None:
    inputs = [draw(2, 16), draw(8, 16), draw(8, 16), draw(*shape), draw(8)]

    def step(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, d: torch.Tensor) -> Any:
        return F.linear(x, a, c) + 1, F.linear(x, b, d) + 1

    program = held(weighted, run_all, context, step, inputs, 4)
    assert product_count(program) == 2


def three(join: Callable[..., Any]) -> Callable[..., Any]:
    """Three products, the first two handed to ``join``."""
    return lambda x, a, b, c: (join(F.linear(x, a), F.linear(x, b)), F.linear(x, c) + 1)


def flat(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return torch.cat([left, right], -1).view(-1) + 1


def beside_each_other(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return torch.cat([left, right], -1)


def strided(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return left.as_strided((2, 4), (4, 1), 2) * 2 + right.sum()


@pytest.mark.parametrize("join", [flat, beside_each_other, strided], ids=lambda join: join.__name__)
def test_what_must_have_its_own_memory_keeps_it(join: Any, weighted: Any, run_all: Any, context: PassContext) -> None:
    """A concatenation that is returned or viewed as one row, and a result that is addressed, are no columns."""
    inputs = [draw(2, 16), draw(8, 16), draw(8, 16), draw(8, 16)]
    program = held(weighted, run_all, context, three(join), inputs, 3)
    assert product_count(program) < 3


def test_weights_that_are_used_twice_are_concatenated_once(weighted: Any, run_all: Any, context: PassContext) -> None:
    """A layer that runs twice; the third pair has the same weights on the other side, so they join otherwise."""

    def step(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = torch.relu(F.linear(x, a) + F.linear(x, b))
        z = torch.relu(F.linear(y, a) + F.linear(y, b))
        return z @ a + 1, z @ b + 2

    inputs = [draw(2, 16), draw(16, 16), draw(16, 16)]
    program = held(weighted, run_all, context, step, inputs, 2)
    ready = prepared(program)
    assert [step for [step] in ready.steps.values()] == [
        {"op": "cat", "dim": dim, "of": ["model.a_1", "model.b_1"]} for dim in (0, 1)
    ]
    assert not any(node.target is ATEN.cat.default for node in ready.program.graph_module.graph.nodes)
    verify(ready.program)
