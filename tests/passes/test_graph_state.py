"""States of graphs: what counts as a change, and that equal calls are inferred once."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx import Graph, GraphModule

from kimigraph.capture import capture_module
from kimigraph.ir import fake
from kimigraph.ir.config import CompileConfig
from kimigraph.passes.fingerprint import GraphState

ATEN = torch.ops.aten


class Model(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * 1).relu() + x


def captured() -> GraphModule:
    return capture_module(Model(), (torch.ones(2, 3),), {}, CompileConfig()).graph_module


def at(graph: Graph, target: Any) -> Any:
    return next(node for node in graph.nodes if node.target is target)


CHANGES: dict[str, Callable[[Graph], Any]] = {
    "another literal": lambda graph: setattr(
        at(graph, ATEN.mul.Tensor), "args", (at(graph, ATEN.mul.Tensor).args[0], 1.0)
    ),
    "another operator": lambda graph: setattr(at(graph, ATEN.relu.default), "target", ATEN.neg.default),
    "another operand": lambda graph: at(graph, ATEN.add.Tensor).update_arg(1, at(graph, ATEN.mul.Tensor)),
    "a keyword": lambda graph: at(graph, ATEN.add.Tensor).update_kwarg("alpha", 2),
    "one node more": lambda graph: (
        graph.inserting_before(at(graph, ATEN.relu.default)).__enter__()
        or graph.call_function(ATEN.neg.default, (at(graph, ATEN.mul.Tensor),))
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_another_state(change: str) -> None:
    module = captured()
    before = GraphState(module)
    assert before == GraphState(module) and before.is_unchanged(GraphState(module))
    CHANGES[change](module.graph)
    assert before != GraphState(module)


def test_an_equal_graph_of_other_nodes_and_arguments_given_anew_are_no_change() -> None:
    module = captured()
    before = GraphState(module)
    assert before == GraphState(captured()) and not before.is_unchanged(GraphState(captured()))
    node = at(module.graph, ATEN.mul.Tensor)
    node.args = (node.args[0], 1)
    assert before == GraphState(module)


def test_equal_calls_are_inferred_once_and_only_equal_ones() -> None:
    graph = captured().graph
    first = at(graph, ATEN.mul.Tensor)
    with graph.inserting_after(first):
        nodes = [
            graph.call_function(ATEN.div.Tensor, (first, 2)),
            graph.call_function(ATEN.div.Tensor, (next(iter(graph.nodes)), 2)),  # of the same form
            graph.call_function(ATEN.pow.Tensor_Scalar, (first, 2)),
        ]
        whole = graph.call_function(ATEN.ones_like.default, (first,), {"dtype": torch.int64})
    one, other, power = map(fake.infer, nodes)
    assert one is other and power is not one
    fake.infer(whole)
    results: list[Any] = []
    for scalar in (2, 2.0, True):
        with graph.inserting_after(whole):
            results.append(fake.infer(graph.call_function(ATEN.mul.Tensor, (whole, scalar))).dtype)
    assert results == [torch.int64, torch.float32, torch.int64]
