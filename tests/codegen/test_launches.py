"""Launch counts of the report."""

import operator

import torch

from kimigraph.codegen import build_artifact, count_launches
from kimigraph.ir.launches import graph_launches, is_view

aten = torch.ops.aten


def test_views_start_nothing(toolbox):
    def build(graph, x):
        turned = graph.call_function(aten.permute.default, (x, [1, 0]))
        flat = graph.call_function(aten.view.default, (x, [6]))
        same = graph.call_function(aten.to.dtype, (flat, torch.float32))
        cast = graph.call_function(aten.to.dtype, (flat, torch.bfloat16))
        written = graph.call_function(aten.add_.Tensor, (turned, 1.0))
        return [written, same, cast]

    graph = toolbox.make_program([toolbox.spec("x", (2, 3))], build).graph_module.graph
    views = {node.name for node in graph.nodes if node.op == "call_function" and is_view(node)}
    assert views == {"permute_default", "view_default", "to_dtype"}
    assert graph_launches(graph) == 2  # the cast and the addition


def test_items_and_metadata_assertions_start_nothing(toolbox):
    def build(graph, x):
        graph.call_function(aten._assert_tensor_metadata.default, (x, None, None, torch.float32))
        pair = graph.call_function(aten.topk.default, (x, 2))
        return [graph.call_function(operator.getitem, (pair, 0))]

    assert graph_launches(toolbox.make_program([toolbox.spec("x", (2, 3))], build).graph_module.graph) == 1


def test_a_kernel_counts_its_launches(programs, artifact_directory):
    program = programs["lightning_indexer"]()
    manifest = build_artifact(program, "cpu", artifact_directory)
    assert graph_launches(program.graph_module.graph) == 2  # index_copy_ and the operator
    assert count_launches(program, program, manifest) == {"before": 2, "after": 3}  # it scores, then selects
