"""Places where fusers are known to go wrong, each a small program that all merging passes keep to the bit."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kimigraph.ir.launches import graph_launches
from kimigraph.passes import PassContext, Pipeline, run_pipeline

PASSES = "canonicalize,raise-norms,merge-horizontal,fuse-pointwise,merge-regions"


def a_write_that_only_the_cache_shows(cache: Tensor, x: Tensor) -> Tensor:
    """Nothing reads the write's result: dropping it would change no output of this step."""
    cache.index_put_((torch.tensor([1]),), x[:1] * 2)
    return x.relu() + 1


def results_with_a_user_between(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    """One kernel with both roots would need the second operand, which comes after the first one's user."""
    first = (x * 2).relu()
    late = torch.cumsum(first.sqrt(), 0)
    return first, late.sqrt() + first, (late * y).relu()


def each_waits_for_the_other(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Two pairs of like operations: merging both would make a circle."""
    a, b = torch.cumsum(x.sin(), 0), torch.cumsum(y.sin(), 0)
    return (a * 2).tanh() + b, (b * 2).tanh() + a


def part_of_a_larger_tensor(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """The result is a view that begins at an odd element of an input."""
    part = x.view(-1)[1:9].view(2, 4)
    return part, part * 2 + y[:2, :4]


def eps_that_half_rounds_to_nothing(x: Tensor, y: Tensor) -> Tensor:
    """1e-8 is 0 in fp16: the root of a row of zeros is infinite, and that times zero no number."""
    eps = torch.full((), 1e-8).half()
    square = (x.half() * 0).square().mean(-1, keepdim=True)
    return (x.half() * 0) * torch.rsqrt(square + eps) + y.half()


def ties_after_a_cast(x: Tensor, y: Tensor) -> Tensor:
    """Eager rounds before it compares; what keeps fp32 finds another number of equals."""
    third = (x @ y).bfloat16().float() / 3
    return (third.bfloat16() == third.bfloat16().amax(-1, keepdim=True)).sum(-1)


def equal_results_of_which_one_changes(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    first, second = x + 1, x + 1
    first.mul_(y)
    return first, second


def zeroed_filled_and_summed(buffer: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """All three could be one kernel, were it not for the order."""
    buffer.zero_()
    buffer.index_put_((torch.tensor([0, 2]),), x[:2] + 1)
    return buffer.sum(-1), buffer.amax(-1)


def like_members_with_other_constants(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    def norm(value: Tensor, eps: float) -> Tensor:
        return value * torch.rsqrt(value.square().mean(-1, keepdim=True) + eps)

    return norm(x, 1e-6), norm(y, 1e-1), torch.softmax(x * 0.5, -1), torch.softmax(y * 2, -1)


def products_around_a_write(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """The products have one left operand in common, but not one value."""
    first = F.linear(x, y)
    x.mul_(2)
    return first.relu(), F.linear(x, y.t()).relu()


HAZARDS: tuple[Callable[..., Any], ...] = (
    a_write_that_only_the_cache_shows,
    results_with_a_user_between,
    each_waits_for_the_other,
    part_of_a_larger_tensor,
    eps_that_half_rounds_to_nothing,
    ties_after_a_cast,
    equal_results_of_which_one_changes,
    zeroed_filled_and_summed,
    like_members_with_other_constants,
    products_around_a_write,
)


@pytest.mark.parametrize("function", HAZARDS, ids=lambda function: function.__name__)
def test_merging_keeps_every_bit(function: Callable[..., Any], trace: Any, run: Any, context: PassContext) -> None:
    tensors = torch.randn(4, 4) * 2, torch.randn(4, 4)
    program = trace(function, *tensors)
    before = graph_launches(program.graph_module.graph)
    run_pipeline(program, Pipeline.parse(PASSES), context)
    eager = [tensor.clone() for tensor in tensors]
    results = function(*eager)
    wanted = [*(results if isinstance(results, tuple) else (results,)), *eager]
    found = run(program, *tensors)
    for new, old in zip([*found[0], *found[1]], wanted, strict=True):
        assert new.dtype is old.dtype and torch.equal(new.nan_to_num(7.5), old.nan_to_num(7.5))
    assert graph_launches(program.graph_module.graph) <= before


def test_what_half_rounds_is_what_the_program_says() -> None:
    """The programs above are hazards: without the rounding they would give other results."""
    assert eps_that_half_rounds_to_nothing(torch.ones(1, 4), torch.zeros(1, 4)).isnan().all()
    torch.manual_seed(0)
    x, y = torch.randn(64, 32), torch.randn(32, 2048)
    wide = (x @ y) / 3
    assert not torch.equal(ties_after_a_cast(x, y), (wide == wide.amax(-1, keepdim=True)).sum(-1))


def test_a_view_of_an_input_stays_a_view_of_it(trace: Any, context: PassContext) -> None:
    x, y = torch.randn(4, 4), torch.randn(4, 4)
    program = trace(part_of_a_larger_tensor, x, y)
    run_pipeline(program, Pipeline.parse(PASSES), context)
    part, _ = program.graph_module(x, y)
    assert part.data_ptr() == x.view(-1)[1:].data_ptr() and part.storage_offset() == 1
