"""Legality of merging against brute force: every order of a small program is run."""

from collections.abc import Iterator
from itertools import pairwise, permutations
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from kimigraph.ir.dependences import Dependences
from kimigraph.passes.algebra.dependences import make_neighbours

ATEN = torch.ops.aten
INPUTS = 3
# Operations that tell every value and every order apart: none commutes with another.
KINDS = ("sub", "lerp", "lerp_", "atan2_")


def build(steps: list[tuple[str, int, int]]) -> GraphModule:
    """A graph of one operation a step on earlier values, by number; it returns every value that it makes."""
    graph = Graph()
    values = [graph.placeholder(f"x{number}") for number in range(INPUTS)]
    made: list[Node] = []
    for kind, left, right in steps:
        first, second = values[left % len(values)], values[right % len(values)]
        if kind == "sub":
            node = graph.call_function(ATEN.sub.Tensor, (first, second))
        elif kind == "atan2_":
            node = graph.call_function(ATEN.atan2_.default, (first, second))
        else:
            node = graph.call_function(getattr(ATEN, kind).Scalar, (first, second, 0.3))
        made.append(node)
        values.append(node)
    graph.output(tuple(made))
    return GraphModule(torch.nn.Module(), graph)


def tensors() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.rand(4, generator=generator, dtype=torch.float64) + 0.5 for _ in range(INPUTS)]


def results(graph: Graph, order: list[Node]) -> dict[str, torch.Tensor] | None:
    """Each node's value as it was computed and each input afterwards; None where an argument is not there yet."""
    values: dict[Node, torch.Tensor] = {}
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    values.update(zip(placeholders, tensors(), strict=True))
    found: dict[str, torch.Tensor] = {}
    for node in order:
        if any(argument not in values for argument in node.all_input_nodes):
            return None
        target: Any = node.target
        values[node] = target(*(values[a] if isinstance(a, Node) else a for a in node.args), **node.kwargs)
        found[node.name] = values[node].clone()
    return found | {node.name: values[node].clone() for node in placeholders}


def same(left: dict[str, torch.Tensor] | None, right: dict[str, torch.Tensor] | None) -> bool:
    return left is not None and right is not None and all(torch.equal(left[name], right[name]) for name in right)


def can_be_one(graph: Graph, members: list[Node]) -> bool:
    """Whether some order of the program puts the members next to each other, in any order among them, and keeps all.

    One node has its operands before it runs and gives its results after: each member must see what it saw, whatever
    the members' own order.
    """
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    wanted = results(graph, nodes)
    others = [node for node in nodes if node not in members]
    for order in permutations(others):
        for place in range(len(order) + 1):
            orders = ([*order[:place], *inner, *order[place:]] for inner in permutations(members))
            if all(same(results(graph, candidate), wanted) for candidate in orders):
                return True
    return False


def pairs(nodes: list[Node]) -> Iterator[list[Node]]:
    for index, first in enumerate(nodes):
        for second in nodes[index + 1 :]:
            yield [first, second]


steps = st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 7), st.integers(0, 7)), min_size=2, max_size=5)


@settings(max_examples=60, deadline=None)
@given(steps)
def test_a_pair_may_merge_exactly_when_some_order_allows_it(program: list[tuple[str, int, int]]) -> None:
    module = build(_proper(program))
    nodes = [node for node in module.graph.nodes if node.op == "call_function"]
    dependences = Dependences(module.graph)
    for pair in pairs(nodes):
        assert (dependences.path(pair) is None) == can_be_one(module.graph, pair), [node.name for node in pair]


def _proper(program: list[tuple[str, int, int]]) -> list[tuple[str, int, int]]:
    """Without operations of a value on itself or on its own storage, which may compute nothing new."""
    roots = list(range(INPUTS))
    kept: list[tuple[str, int, int]] = []
    for kind, left, right in program:
        left, right = left % len(roots), right % len(roots)
        if roots[left] == roots[right]:
            right = next(number for number, root in enumerate(roots) if root != roots[left])
        kept.append((kind, left, right))
        roots.append(roots[left] if kind.endswith("_") else len(roots) + 100)
    return kept


@settings(max_examples=60, deadline=None)
@given(steps, st.integers(0, 100))
def test_neighbours_compute_what_the_program_computed(program: list[tuple[str, int, int]], choice: int) -> None:
    module = build(_proper(program))
    nodes = [node for node in module.graph.nodes if node.op == "call_function"]
    dependences = Dependences(module.graph)
    legal = [pair for pair in pairs(nodes) if dependences.path(pair) is None]
    if not legal:
        return
    pair = legal[choice % len(legal)]
    wanted = results(module.graph, nodes)
    make_neighbours(pair)
    module.graph.lint()
    order = [node for node in module.graph.nodes if node.op == "call_function"]
    places = [order.index(node) for node in pair]
    assert abs(places[0] - places[1]) == 1
    assert same(results(module.graph, order), wanted)


def traced(function: Any, *inputs: torch.Tensor) -> tuple[Graph, dict[str, Node]]:
    graph = make_fx(function, tracing_mode="fake")(*inputs).graph
    return graph, {node.name: node for node in graph.nodes}


def test_two_merges_that_wait_for_each_other_exclude_one_another() -> None:
    graph, nodes = traced(lambda x, y: (x.sin().cos(), y.exp().tanh()), torch.ones(2), torch.ones(2))
    dependences = Dependences(graph)
    first, second = [nodes["sin"], nodes["tanh"]], [nodes["cos"], nodes["exp"]]
    assert dependences.path(first) is None and dependences.path(second) is None
    dependences.merge(first)
    assert dependences.path(second) is not None


def test_a_zeroed_written_and_summed_buffer_stays_in_order() -> None:
    def step(buffer: torch.Tensor, index: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return buffer.zero_().index_put_((index,), values).sum() + buffer.max()

    graph, _ = traced(step, torch.ones(4), torch.tensor([1]), torch.ones(1))
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    assert len(nodes) == 5
    dependences = Dependences(graph)
    for node, later in pairwise(nodes):
        if {node.name, later.name} != {"sum_1", "max_1"}:
            assert dependences.path([node, later]) is not None


def test_random_numbers_keep_their_order() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    first = graph.call_function(ATEN.rand_like.default, (x,))
    second = graph.call_function(ATEN.rand_like.default, (x,))
    graph.output((first, second))
    assert Dependences(graph).path([first, second]) == (first, second)


def test_a_reader_through_a_view_waits_for_the_write() -> None:
    graph, nodes = traced(lambda x: (x.view(2, 2).sin(), x.zero_(), x.cos()), torch.ones(4))
    dependences = Dependences(graph)
    assert dependences.precedes(nodes["sin"], nodes["zero_"])
    assert dependences.precedes(nodes["zero_"], nodes["cos"])
    assert dependences.path([nodes["sin"], nodes["cos"]]) == (nodes["sin"], nodes["cos"])
