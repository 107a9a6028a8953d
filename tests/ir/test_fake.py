import logging
import operator

import pytest
import torch

from kimigraph.ir.errors import CompileError
from kimigraph.ir.fake import describe, fake_mode, infer, infer_all

ATEN = torch.ops.aten


def nodes_of(program):
    return {node.name: node for node in program.graph_module.graph.nodes}


def test_a_new_node_gets_shape_and_dtype_from_its_arguments(build):
    program = build(lambda x, w: x @ w, {"x": torch.randn(3, 4), "w": torch.randn(4, 5)})
    graph, nodes = program.graph_module.graph, nodes_of(program)
    with graph.inserting_before(nodes["mm"]):
        node = graph.call_function(ATEN.addmm.default, (nodes["x"], nodes["x"], nodes["w"]))
        scores = graph.call_function(ATEN.topk.default, (nodes["x"], 2))
        values = graph.call_function(operator.getitem, (scores, 1))
    with pytest.raises(CompileError, match="addmm"):
        infer(node)
    assert "val" not in node.meta
    infer(scores)
    assert infer(values).dtype == torch.int64
    assert tuple(values.meta["val"].shape) == (3, 2)
    assert values.meta["val"].fake_mode is fake_mode(graph)


def test_a_node_without_tensor_arguments_joins_the_graphs_mode(build):
    program = build(lambda x: x + 1, {"x": torch.randn(3)})
    graph = program.graph_module.graph
    with graph.inserting_before(nodes_of(program)["add"]):
        node = graph.call_function(ATEN.arange.default, (7,))
    assert infer(node).fake_mode is nodes_of(program)["x"].meta["val"].fake_mode


def test_the_error_names_node_target_and_shapes(build, caplog):
    program = build(lambda x, w: x @ w, {"x": torch.randn(3, 4), "w": torch.randn(4, 5)})
    graph, nodes = program.graph_module.graph, nodes_of(program)
    with graph.inserting_before(nodes["mm"]):
        node = graph.call_function(ATEN.mm.default, (nodes["w"], nodes["w"]))
    with pytest.raises(CompileError) as caught:
        infer(node)
    message = str(caught.value)
    assert node.name in message and "aten.mm.default" in message and "w float32[4, 5]" in message
    assert "\n" not in message
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_an_argument_without_a_value_is_named(build):
    program = build(lambda x: (x + 1) * 2, {"x": torch.randn(3)})
    nodes = nodes_of(program)
    del nodes["add"].meta["val"]
    with pytest.raises(CompileError, match="argument add has no meta"):
        infer(nodes["mul"])


def test_infer_all_fills_every_node(build):
    program = build(lambda x, c: c.copy_(x * 2) + 1, {"x": torch.randn(3), "c": torch.randn(3)})
    for node in program.graph_module.graph.nodes:
        if node.op == "call_function":
            del node.meta["val"]
    infer_all(program.graph_module)
    assert all("val" in node.meta for node in program.graph_module.graph.nodes if node.op != "output")


def test_a_graph_without_fake_values_is_refused():
    graph = torch.fx.Graph()
    graph.output(graph.call_function(ATEN.arange.default, (3,)))
    with pytest.raises(CompileError, match="no node of the graph carries a fake tensor"):
        fake_mode(graph)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (torch.zeros(2, 3, dtype=torch.bfloat16), "bfloat16[2, 3]"),
        (torch.tensor(1), "int64[]"),
        ((torch.zeros(1), torch.zeros(0)), "(float32[1], float32[0])"),
        (None, "without a value"),
        (3, "3"),
    ],
)
def test_describe(value, text):
    assert describe(value) == text
