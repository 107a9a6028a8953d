"""``canonicalize``: what goes, what must stay, and that values and updates do not change in a single bit."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx import GraphModule

from kimigraph.ir.program import CapturedProgram
from kimigraph.passes import PassContext, Pipeline, run_pipeline
from kimigraph.passes.canonicalize import Canonicalize

ATEN = torch.ops.aten
Trace = Callable[..., CapturedProgram]
Check = Callable[..., CapturedProgram]


@pytest.fixture
def check(trace: Trace, run: Callable[..., Any], context: PassContext) -> Check:
    """Trace, canonicalize (verified), and compare outputs and updated inputs bit by bit."""

    def compare(function: Callable[..., Any], *tensors: torch.Tensor, edit: Any = None) -> CapturedProgram:
        program = trace(function, *tensors)
        if edit:
            edit(program.graph_module)
        expected = run(program, *tensors)
        run_pipeline(program, Pipeline((Canonicalize(),)), context)
        found = run(program, *tensors)
        for kind, old, new in zip(("output", "input afterwards"), expected, found, strict=True):
            assert len(old) == len(new)
            for index, (a, b) in enumerate(zip(old, new, strict=True)):
                assert a.dtype == b.dtype and torch.equal(bits(a), bits(b)), f"{kind} {index}"
        return program

    return compare


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def names(program: CapturedProgram) -> list[str]:
    return [node.name for node in program.graph_module.graph.nodes]


# Common subexpressions -----------------------------------------------------------------------------------------------


def test_equal_pure_nodes_become_one(check: Check, count: Any) -> None:
    program = check(lambda x: (x.sin() * 2 + x.sin() * 2).cos(), torch.randn(3, 4))
    graph = program.graph_module.graph
    assert count(graph, ATEN.sin.default) == 1 and count(graph, ATEN.mul.Tensor) == 1


@pytest.mark.parametrize(
    ("first", "second"), [(0.0, -0.0), (1e-5, 1e-6), (1, 1.0), (True, 1), (float("inf"), float("-inf"))]
)
def test_literals_are_told_by_type_and_bits(first: Any, second: Any, check: Check, count: Any) -> None:
    program = check(lambda x: torch.atan2(x * first, x) - torch.atan2(x * second, x), torch.tensor([-0.0, 0.0, 2.0]))
    assert count(program.graph_module.graph, ATEN.atan2.default) == 2


def test_nan_equals_itself(check: Check, count: Any) -> None:
    nan = float("nan")
    program = check(lambda x: (x + nan).isnan() & (x + nan).isfinite(), torch.randn(3))
    assert count(program.graph_module.graph, ATEN.add.Tensor) == 1


def test_a_read_before_and_one_after_a_write_stay_apart(check: Check, count: Any) -> None:
    def step(x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        before = state * 2
        state.add_(x)
        return before + state * 2

    program = check(step, torch.randn(3, 4), torch.randn(3, 4))
    assert count(program.graph_module.graph, ATEN.mul.Tensor) == 2


def test_a_write_through_an_alias_separates_too(check: Check, count: Any) -> None:
    def step(x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        before = state * 2
        state[0].zero_()
        return before + state * 2 + x

    program = check(step, torch.randn(3, 4), torch.randn(3, 4))
    assert count(program.graph_module.graph, ATEN.mul.Tensor) == 2


def test_reads_on_one_side_of_a_write_are_merged(check: Check, count: Any) -> None:
    def step(x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        early = (state * 2) + (state * 2)
        state.add_(x)
        return early + (state * 2) + (state * 2)

    program = check(step, torch.randn(3, 4), torch.randn(3, 4))
    assert count(program.graph_module.graph, ATEN.mul.Tensor) == 2


def test_equal_tensors_stay_apart_when_one_is_written(check: Check, count: Any) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        a, b = x + 1, x + 1
        a.mul_(3)
        return a - b

    program = check(step, torch.randn(3, 4))
    assert count(program.graph_module.graph, ATEN.add.Tensor) == 2


def test_equal_buffers_stay_apart_when_one_is_filled(check: Check, count: Any) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        a, b = torch.zeros(3, 4), torch.zeros(3, 4)
        a[1].copy_(x[0])
        return a + 2 * b

    assert count(check(step, torch.randn(3, 4)).graph_module.graph, ATEN.zeros.default) == 2


def test_two_equal_outputs_stay_two_objects(check: Check) -> None:
    program = check(lambda x: (x + 1, x + 1), torch.randn(3))
    first, second = program.graph_module(torch.zeros(3))
    first.fill_(7)
    assert second.tolist() == [1, 1, 1]


def test_equal_outputs_stay_apart_when_a_third_like_them_stays_inside(check: Check, count: Any) -> None:
    program = check(lambda x: ((x + 1).sin(), x + 1, (x + 1)[0:2]), torch.randn(3))
    _, second, third = program.graph_module(torch.zeros(3))
    second.fill_(7)
    assert third.tolist() == [1, 1]
    assert count(program.graph_module.graph, ATEN.add.Tensor) == 2


def test_random_numbers_are_neither_merged_nor_dropped(count: Any, trace: Trace, context: PassContext) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        torch.rand_like(x)  # unused, but it moves the generator on
        return torch.rand_like(x) + torch.rand_like(x) * 10

    program = trace(step, torch.randn(5))
    run_pipeline(program, Pipeline((Canonicalize(),)), context)
    torch.manual_seed(3)
    assert torch.equal(program.graph_module(torch.zeros(5))[0], step_with_seed(step, 3))
    assert count(program.graph_module.graph, ATEN.rand_like.default) == 3


def step_with_seed(step: Callable[..., torch.Tensor], seed: int) -> torch.Tensor:
    torch.manual_seed(seed)
    return step(torch.zeros(5))


# Views, casts, copies ------------------------------------------------------------------------------------------------


def test_views_that_change_nothing_go(check: Check, count: Any) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        y = x.view(3, 4).reshape(3, 4).expand(3, 4)[:, 0:4].contiguous().detach()
        return ATEN.alias.default(y).float().transpose(1, 1).sin()

    assert names(check(step, torch.randn(3, 4))) == ["x_1", "sin", "output"]


def test_views_that_do_something_stay(check: Check) -> None:
    x = torch.randn(4, 4)
    program = check(lambda x: (x.transpose(0, 1) @ x, x[1:] + 1, x.reshape(2, 8).sin(), x.flip(0)[:, 1:3] * 2), x)
    assert len(names(program)) == 11


def test_a_pad_that_moves_the_elements_stays(check: Check) -> None:
    pad = torch.nn.functional.pad
    assert len(names(check(lambda x: pad(x, (1, -1)).sin() + pad(x, (0, 0)).cos(), torch.randn(3, 4)))) == 6


def test_casts_to_the_same_type_go_and_rounding_ones_stay(check: Check, count: Any) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        same = ATEN._to_copy.default(x, dtype=torch.float32)
        rounded = ATEN._to_copy.default(ATEN._to_copy.default(x, dtype=torch.bfloat16), dtype=torch.float32)
        return same + 10 * rounded

    graph = check(step, torch.randn(3, 4)).graph_module.graph
    assert count(graph, ATEN._to_copy.default) == 2


def test_an_eps_narrowed_to_zero_stays_zero(check: Check) -> None:
    def step(x: torch.Tensor, eps: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean() + eps.half().float())

    program = check(step, torch.zeros(3), torch.tensor(1e-8))
    assert program.graph_module(torch.zeros(3), torch.tensor(1e-8))[0].isnan().all()


def test_a_copy_that_keeps_an_old_value_stays(check: Check, count: Any) -> None:
    def step(x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        old = state.clone()
        state.copy_(x)
        return old * 2

    assert count(check(step, torch.randn(3), torch.randn(3)).graph_module.graph, ATEN.clone.default) == 1


def test_a_copy_that_is_written_stays(check: Check, count: Any) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return x.clone().add_(1) * x

    assert count(check(step, torch.randn(3)).graph_module.graph, ATEN.clone.default) == 1


def test_a_copy_that_leaves_the_graph_stays(check: Check) -> None:
    x = torch.zeros(3)
    program = check(lambda x: (x.clone(), x.clone().view(3, 1).squeeze(1)), x)
    for output in program.graph_module(x):
        output.fill_(5)
    assert x.tolist() == [0, 0, 0]


def test_a_copy_for_reading_goes(check: Check) -> None:
    assert names(check(lambda x: x.clone().sin(), torch.randn(3))) == ["x_1", "sin", "output"]


def test_a_copy_into_other_strides_stays(check: Check, count: Any) -> None:
    program = check(lambda x: x.t().clone(memory_format=torch.contiguous_format).view(-1) * 2, torch.randn(3, 4))
    assert count(program.graph_module.graph, ATEN.clone.default) == 1


def test_values_through_a_dtype_view_keep_their_place_among_writes(check: Check) -> None:
    def step(x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        bits = state.view(torch.int32) * 2
        state[:, 2:5] = 2
        return bits + x.to(torch.int32)

    check(step, torch.randn(3, 6), torch.randn(3, 6))


def test_a_functional_update_keeps_its_value_when_the_base_is_cleared(check: Check) -> None:
    def step(state: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        updated = torch.slice_scatter(state, source, 0, 1, 3)
        state.zero_()
        return updated

    check(step, torch.randn(4, 2), torch.randn(2, 2))


# Assertions and dead code --------------------------------------------------------------------------------------------


def add_asserts(graph_module: GraphModule) -> None:
    """Five metadata assertions that hold, behind the first node."""
    graph = graph_module.graph
    x = next(iter(graph.nodes))
    target = ATEN._assert_tensor_metadata.default
    with graph.inserting_after(x):
        for args, kwargs in [
            ((None, None, torch.float32), {"device": torch.device("cpu"), "layout": torch.strided}),
            (([3, 4],), {}),
            ((None, [4, 1]), {}),
            ((), {"device": "cpu"}),
            ((), {}),
        ]:
            graph.call_function(target, (x, *args), kwargs).meta["val"] = None


def test_provable_metadata_asserts_go(check: Check, count: Any) -> None:
    program = check(lambda x: x.sin(), torch.randn(3, 4), edit=add_asserts)
    assert names(program) == ["x_1", "sin", "output"]


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((None, None, torch.float16), {}),
        (([3, 5],), {}),
        (([3],), {}),
        ((None, [1, 3]), {}),
        ((None, None, torch.float32), {"device": torch.device("cuda")}),
    ],
)
def test_an_assert_that_fails_stays(
    args: tuple[Any, ...], kwargs: Any, trace: Trace, context: PassContext, run: Any, count: Any
) -> None:
    program = trace(lambda x: x.sin(), torch.randn(3, 4))
    graph = program.graph_module.graph
    x = next(iter(graph.nodes))
    with graph.inserting_after(x):
        graph.call_function(ATEN._assert_tensor_metadata.default, (x, *args), kwargs).meta["val"] = None
    run_pipeline(program, Pipeline((Canonicalize(),)), context)
    assert count(graph, ATEN._assert_tensor_metadata.default) == 1
    with pytest.raises(RuntimeError, match="mismatch"):
        run(program, torch.randn(3, 4))


def test_dead_code_goes_and_writes_stay(check: Check, count: Any) -> None:
    def step(x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        (x.sin() @ x.cos().t()).exp()  # dead
        torch.nn.functional.scaled_dot_product_attention(x, x, x)  # dead, though its schema says random
        state[1:2].mul_(2)
        state.index_copy_(0, torch.tensor([0]), x[:1])
        return x + 1

    program = check(step, torch.randn(3, 4), torch.randn(3, 4))
    graph = program.graph_module.graph
    assert count(graph, ATEN.sin.default) == count(graph, ATEN.exp.default) == 0
    assert count(graph, ATEN.mul_.Tensor) == count(graph, ATEN.index_copy_.default) == 1
    assert not any("attention" in str(node.target) for node in graph.nodes)


def test_nothing_to_do_is_not_a_change(trace: Trace, context: PassContext) -> None:
    program = trace(lambda x: x.sin(), torch.randn(3))
    result = run_pipeline(program, Pipeline((Canonicalize(),)), context)[0].result
    assert not result.modified and not any(result.statistics.values()) and result.remarks == ()


def test_a_second_run_finds_nothing(trace: Trace, context: PassContext) -> None:
    program = trace(lambda x: (x.sin().clone() + x.sin()).view(3, 4).cos(), torch.randn(3, 4))
    first, second = run_pipeline(program, Pipeline((Canonicalize(), Canonicalize())), context)
    assert first.result.modified and not second.result.modified
    assert first.result.statistics["nodes-merged"] == 1 and first.result.statistics["no-ops-dropped"] == 2
