"""Graph modules that make their code late: the same results, the same text, no code while nobody asks."""

import copy

import pytest
import torch
from torch.fx import Graph, GraphModule

from kimigraph.ir.deferred import DeferredGraphModule


def make() -> DeferredGraphModule:
    graph = Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(torch.ops.aten.mul.Tensor, (x, 3)))
    return DeferredGraphModule(torch.nn.Module(), graph)


def test_code_is_made_at_the_first_call_and_after_a_change(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    original = GraphModule.recompile
    monkeypatch.setattr(GraphModule, "recompile", lambda self: (made.append(1), original(self))[1])
    module, x = make(), torch.ones(2)
    module.recompile()
    assert made == []
    assert torch.equal(module(x), 3 * x) and torch.equal(module(x), 3 * x)
    assert made == [1]
    node = next(node for node in module.graph.nodes if node.op == "call_function")
    node.args = (node.args[0], 5)
    module.recompile()
    assert made == [1] and torch.equal(module(x), 5 * x) and made == [1, 1]


def test_two_modules_have_code_of_their_own() -> None:
    first, second, x = make(), make(), torch.ones(2)
    next(node for node in second.graph.nodes if node.op == "call_function").args = (
        next(iter(second.graph.nodes)),
        7,
    )
    second.recompile()
    assert torch.equal(first(x), 3 * x) and torch.equal(second(x), 7 * x) and torch.equal(first(x), 3 * x)


def test_its_text_is_that_of_any_graph_module() -> None:
    module = make()
    assert "mul.Tensor(x, 3)" in module.code
    assert module.code == GraphModule(torch.nn.Module(), module.graph).code
    copied = copy.deepcopy(module)
    assert torch.equal(copied(torch.ones(2)), 3 * torch.ones(2))
