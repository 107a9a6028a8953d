"""Patterns: commutative, blind to views and casts, strict about which tensor and which axis."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Node

from kimigraph.ir.program import CapturedProgram
from kimigraph.passes.algebra.frames import Frame
from kimigraph.passes.algebra.match import Match
from kimigraph.passes.algebra.unify import Bind, Either, Leaf, Literal, Number, Op, Pattern, Scaled, Sum, find, scaling

Trace = Callable[..., CapturedProgram]
Function = Callable[..., Tensor]

PRODUCT = Sum(Op("mul", Leaf("a"), Leaf("b")), "k")
NORM = Op("mul", Leaf("x"), Op("rsqrt", Op("add", Sum(Op("mul", Leaf("x"), Leaf("x")), "k"), Number("eps"))))


def match(trace: Trace, pattern: Pattern, function: Function, *tensors: Tensor, axes: str) -> tuple[Match | None, Any]:
    program = trace(lambda *args: (function(*args),), *tensors)
    node = next(n for n in program.graph_module.graph.nodes if n.op == "output").args[0][0]
    assert isinstance(node, Node)
    return find(pattern, node, Frame.of(axes))


PRODUCTS: list[Function] = [
    lambda a, b: a @ b,
    lambda a, b: torch.bmm(a.unsqueeze(0), b.unsqueeze(0)).squeeze(0),
    lambda a, b: (a.unsqueeze(1) * b.t()).sum(-1),
    lambda a, b: (b.t() * a.unsqueeze(1)).sum(-1),
    lambda a, b: (a.unsqueeze(-1) * b).sum(1),
    lambda a, b: (b.t() @ a.t()).t(),
    lambda a, b: (a.view(2, 1, 4, 1) * b.unsqueeze(0).unsqueeze(1)).sum(2, keepdim=True).view(2, 3),
]


@pytest.mark.parametrize("function", PRODUCTS)
def test_a_contraction_in_all_spellings(function: Function, trace: Trace) -> None:
    found, trace_ = match(trace, PRODUCT, function, torch.randn(2, 4), torch.randn(4, 3), axes="ij")
    assert found is not None, trace_.deepest()
    by_size = {leaf.base.meta["val"].shape: leaf for leaf in (found.leaf("a"), found.leaf("b"))}
    assert by_size[(2, 4)].strides() == ({"i": 4, "j": 0, "k": 1}, 0)
    assert by_size[(4, 3)].strides() == ({"i": 0, "j": 1, "k": 3}, 0)


def test_a_leaf_met_twice_must_be_one_tensor(trace: Trace) -> None:
    def same(x: Tensor, y: Tensor) -> Tensor:
        return torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) * x

    def other(x: Tensor, y: Tensor) -> Tensor:
        return torch.rsqrt((x * y).sum(-1, keepdim=True) + 1e-6) * x

    x, y = torch.randn(2, 4), torch.randn(2, 4)
    found, _ = match(trace, NORM, same, x, y, axes="ik")
    assert found is not None and found.numbers == {"eps": 1e-6}
    found, trace_ = match(trace, NORM, other, x, y, axes="ik")
    assert found is None and "the same 'x' as before" in trace_.deepest().reason


def test_the_inner_axis_counts_for_the_reduced_occurrence(trace: Trace) -> None:
    found, _ = match(
        trace, NORM, lambda x: torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) * x, torch.randn(2, 4), axes="ik"
    )
    assert found is not None
    assert {str(leaf.strides()) for leaf in found.leaves["x"]} == {str(({"i": 4, "k": 1}, 0))}


def test_a_sum_over_the_wrong_axis_shows_in_the_strides(trace: Trace) -> None:
    """Square sizes: only the strides tell rows from columns."""
    found, _ = match(
        trace, NORM, lambda x: torch.rsqrt((x * x).sum(0, keepdim=True) + 1e-6) * x, torch.randn(4, 4), axes="ik"
    )
    assert found is not None
    assert any(leaf.strides() != ({"i": 4, "k": 1}, 0) for leaf in found.leaves["x"])


def test_leaves_may_be_held_constant_along_axes(trace: Trace) -> None:
    pattern = Op("add", Leaf("data"), Leaf("bias", constant_along="b"))
    for function in (lambda x, c: x + c, lambda x, c: c + x):
        found, _ = match(trace, pattern, function, torch.randn(2, 4), torch.randn(4), axes="bk")
        assert found is not None
        assert found.leaf("bias").base.meta["val"].shape == (4,)


def test_positive_constants_multiply_up(trace: Trace) -> None:
    pattern = Scaled("scale", Op("sin", Leaf("x")))
    found, _ = match(
        trace,
        pattern,
        lambda x: (x.sin() * 3.0).view(4) / 2.0 * torch.full((), 0.5),
        torch.randn(2, 2),
        axes="i",
    )
    assert found is not None and found.numbers["scale"] == pytest.approx(0.75)
    found, trace_ = match(trace, pattern, lambda x: x.sin() * -3.0, torch.randn(4), axes="i")
    assert found is None and "positive factor" in trace_.deepest().reason


def test_scaling_by_a_tensor_is_none(trace: Trace) -> None:
    program = trace(lambda x, y: (x * y,), torch.randn(4), torch.randn(4))
    node = next(n for n in program.graph_module.graph.nodes if n.op == "output").args[0][0]
    assert scaling(node) is None


def test_the_trace_names_the_deepest_failure(trace: Trace) -> None:
    pattern = Op("exp", Op("neg", Op("sin", Leaf("x"))))
    found, trace_ = match(trace, pattern, lambda x: (-x.cos()).exp(), torch.randn(4), axes="i")
    miss = trace_.deepest()
    assert found is None and miss.reason == "expected sin, found aten.cos" and miss.depth == 2


def test_further_arguments_must_be_defaults(trace: Trace) -> None:
    pattern = Op("clamp", Leaf("x"), Literal(0))
    assert match(trace, pattern, lambda x: x.clamp(0), torch.randn(4), axes="i")[0] is not None
    assert match(trace, pattern, lambda x: x.clamp(0, 5), torch.randn(4), axes="i")[0] is None
    assert (
        match(
            trace, Op("add", Leaf("x"), Leaf("y")), lambda x: torch.add(x, x.sin(), alpha=2), torch.randn(4), axes="i"
        )[0]
        is None
    )


def test_alternatives_and_bound_results(trace: Trace) -> None:
    wave = Bind("wave", Either(Op("sin", Leaf("x")), Op("cos", Leaf("x"))))
    pattern = Op("mul", Op("exp", wave), wave)
    found, _ = match(trace, pattern, lambda x: (lambda w: w.exp() * w)(x.cos()), torch.randn(4), axes="i")
    assert found is not None and len(found.leaves["wave"]) == 2 and len(found.leaves["x"]) == 1
    assert match(trace, pattern, lambda x: x.cos().exp() * x.sin(), torch.randn(4), axes="i")[0] is None
