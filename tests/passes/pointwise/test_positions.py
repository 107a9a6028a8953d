"""Positions: every region computes its own, and what is left stands where it is used."""

from typing import Any

import torch
from torch import Tensor

from kimigraph.ir.launches import graph_launches
from kimigraph.ir.program import CapturedProgram
from kimigraph.ir.purity import mutated_arguments
from kimigraph.passes import PassContext, Pipeline, run_pipeline
from kimigraph.passes.fuse_pointwise import FusePointwise
from kimigraph.passes.merge_regions import MergeRegions


def fused(trace: Any, run: Any, context: PassContext, function: Any, *tensors: Tensor) -> CapturedProgram:
    """After both passes; results and inputs are those of the function, to the bit."""
    program = trace(function, *tensors)
    run_pipeline(program, Pipeline((FusePointwise(), MergeRegions())), context)
    eager = [tensor.clone() for tensor in tensors]
    results = function(*eager)
    found = run(program, *tensors)
    for new, old in zip([*found[0], *found[1]], [*results, *eager], strict=True):
        assert torch.equal(new, old)
    return program


def caches() -> list[Tensor]:
    lengths = torch.tensor([1, 3], dtype=torch.int32)
    return [lengths, torch.zeros(2, 8, 6), torch.zeros(2, 8, 4), torch.randn(2, 6), torch.randn(2, 4)]


def write_both(lengths: Tensor, first: Tensor, second: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    rows, places = torch.arange(2), lengths.long() + 1
    first.index_put_((rows, places), a / a.square().mean(-1, keepdim=True))
    second.index_put_((rows, places), b.tanh())
    return first.sum(-1), second * 1


def test_writes_of_two_caches_at_the_same_places_are_one_launch(trace: Any, run: Any, context: PassContext) -> None:
    program = fused(trace, run, context, write_both, *caches())
    [written] = [node for node in program.graph_module.graph.nodes if mutated_arguments(node)]
    assert written.meta["region"] == "horizontal" and len(mutated_arguments(written)) == 2
    assert graph_launches(program.graph_module.graph) == 2


def test_a_position_that_only_a_product_reads_stays_one(trace: Any, run: Any, context: PassContext) -> None:
    def function(lengths: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        places = lengths + 1
        return x @ weight, torch.cumsum(places, 0) + torch.cumsum(places, 0).flip(0)

    program = trace(function, torch.tensor([1, 2]), torch.randn(16, 4), torch.randn(4, 4))
    run_pipeline(program, Pipeline((FusePointwise(),)), context)
    nodes = [node for node in program.graph_module.graph.nodes if node.op == "call_function"]
    names = [str(node.target) for node in nodes]
    assert names.count("aten.add.Tensor") == 1 and names.index("aten.mm.default") < names.index("aten.add.Tensor")


def test_positions_that_a_step_counts_up_are_shared(trace: Any, run: Any, context: PassContext) -> None:
    """A counter that is written later is read once: copies might see the new value."""

    def function(counter: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        places = counter + 1
        first = x * places
        counter.add_(5)
        return first, y - places, counter * 2

    fused(trace, run, context, function, torch.tensor([3]), torch.randn(4), torch.randn(9))


def test_copies_that_join_nothing_are_one_again(trace: Any, run: Any, context: PassContext) -> None:
    """Users in regions of other extents, and between them what parts them."""

    def function(lengths: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        places = lengths * 2 + 1
        return x.gather(1, places[:, None]).cumsum(0), y.gather(1, places[:, None]).cumsum(0)

    program = fused(trace, run, context, function, torch.tensor([0, 1]), torch.randn(2, 9), torch.randn(2, 70000))
    assert graph_launches(program.graph_module.graph) <= 4
