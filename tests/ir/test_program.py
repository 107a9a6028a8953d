import torch

from kimigraph.ir.fake import infer
from kimigraph.ir.purity import dead_code
from kimigraph.ir.regions import extract_region

ATEN = torch.ops.aten


def test_a_copy_keeps_names_metas_and_regions_and_shares_tensors(build):
    program = build(
        lambda c, w, x: (c.copy_(x @ w), (x * 2).relu().neg()),
        {"c": torch.zeros(2, 2), "w": torch.randn(2, 2), "x": torch.randn(2, 2)},
        c={"kind": "cache", "source": "cache.0.latent", "mutated": True},
        w={"kind": "weight"},
    )
    nodes = {node.name: node for node in program.graph_module.graph.nodes}
    nodes["mm"].meta["selects"] = "topk_3"
    # A gap in the numbering: the copy may not close it.
    graph = program.graph_module.graph
    with graph.inserting_before(nodes["neg"]):
        for _ in range(2):
            infer(graph.call_function(ATEN.neg.default, (nodes["relu"],)))
        late = graph.call_function(ATEN.neg.default, (nodes["relu"],))
        infer(late)
    nodes["neg"].args = (late,)
    assert dead_code(graph) == 2
    extract_region(program.graph_module, [nodes["mul"], nodes["relu"]], "region_0", "pointwise")
    program.graph_module.recompile()
    copy = program.copy()
    assert [n.name for n in copy.graph_module.graph.nodes] == [n.name for n in graph.nodes]
    assert [n.meta for n in copy.graph_module.graph.nodes] == [n.meta for n in graph.nodes]
    assert copy.tensors["w"] is program.tensors["w"]
    assert (copy.inputs, copy.outputs) == (program.inputs, program.outputs)
    tensors = [torch.zeros(2, 2), torch.randn(2, 2), torch.randn(2, 2)]
    others = [tensor.clone() for tensor in tensors]
    for a, b in zip(program.graph_module(*tensors), copy.graph_module(*others), strict=True):
        assert torch.equal(a, b)
    assert torch.equal(tensors[0], others[0]) and tensors[0].count_nonzero()
    size = len(graph.nodes)
    for node in reversed(copy.graph_module.graph.nodes):
        if not node.users and node.op == "call_function":
            copy.graph_module.graph.erase_node(node)
    assert len(graph.nodes) == size


def test_the_placeholders_by_name(build):
    program = build(lambda x, y: x + y, {"x": torch.randn(1), "y": torch.randn(1)})
    assert list(program.placeholders) == ["x", "y"]
    assert [spec.bound for spec in program.inputs] == [False, False]
