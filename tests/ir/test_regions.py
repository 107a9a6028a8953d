import operator

import pytest
import torch

from kimigraph.ir.errors import CompileError
from kimigraph.ir.fake import infer_all
from kimigraph.ir.purity import dead_code, is_pure, mutated_arguments, mutation_between, storage_root
from kimigraph.ir.regions import copy_graph_module, extract_region, inline_region

ATEN = torch.ops.aten


def nodes_of(program, *names):
    nodes = {node.name: node for node in program.graph_module.graph.nodes}
    return [nodes[name] for name in names]


def names_of(graph_module):
    return [node.name for node in graph_module.graph.nodes]


def run(program, *tensors):
    program.graph_module.recompile()
    copies = [tensor.clone() for tensor in tensors]
    return [*program.graph_module(*copies), *copies]


def same(got, want):
    return all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def norm_program(build):
    """x * rsqrt(mean(x^2) + eps), with the mean returned too."""

    def function(x, w):
        mean = (x * x).mean(-1, keepdim=True)
        y = x * torch.rsqrt(mean + 1e-6)
        return (y * w) @ w, mean

    return build(function, {"x": torch.randn(3, 4), "w": torch.randn(4)})


def test_a_region_runs_as_its_nodes_did(build):
    program = norm_program(build)
    tensors = [torch.randn(3, 4), torch.randn(4)]
    want = run(program, *tensors)
    before = names_of(program.graph_module)
    inside = nodes_of(program, "mul", "mean", "add", "rsqrt", "mul_1")
    call = extract_region(program.graph_module, inside, "region_0", "pointwise")
    program.graph_module.graph.lint()
    assert same(run(program, *tensors), want)
    assert call.meta["region"] == "pointwise"
    assert call.meta["replaces"] == ("mul", "mean", "add", "rsqrt", "mul_1")
    child = program.graph_module.region_0
    assert [n.name for n in child.graph.nodes if n.op == "placeholder"] == ["x"]
    assert all("val" in n.meta for n in child.graph.nodes if n.op != "output")
    assert [tuple(v.shape) for v in call.meta["val"]] == [(3, 1), (3, 4)]
    items = [n for n in program.graph_module.graph.nodes if n.target is operator.getitem]
    assert [tuple(n.meta["val"].shape) for n in items] == [(3, 1), (3, 4)]
    inline_region(program.graph_module, call)
    program.graph_module.graph.lint()
    assert names_of(program.graph_module) == before
    assert not hasattr(program.graph_module, "region_0")
    assert same(run(program, *tensors), want)


def test_one_result_is_not_wrapped(build):
    program = norm_program(build)
    call = extract_region(program.graph_module, nodes_of(program, "add", "rsqrt"), "region_0", "pointwise")
    assert isinstance(call.meta["val"], torch.Tensor)
    assert not [n for n in program.graph_module.graph.nodes if n.target is operator.getitem]
    infer_all(program.graph_module)
    assert tuple(call.meta["val"].shape) == (3, 1)


def cache_program(build):
    """A cache that is written in the middle, through a view, and read after."""

    def function(cache, x):
        before = cache * 2
        row = x + 1
        cache[1].copy_(row)
        return before + cache, row * 3

    return build(function, {"cache": torch.zeros(2, 3), "x": torch.randn(3)}, cache={"kind": "cache", "mutated": True})


def test_a_write_inside_a_region_survives_and_is_known(build):
    program = cache_program(build)
    tensors = [torch.randn(2, 3), torch.randn(3)]
    want = run(program, *tensors)
    graph = program.graph_module.graph
    cache, mul, add = nodes_of(program, "cache", "mul", "add_1")
    call = extract_region(program.graph_module, nodes_of(program, "add", "select", "copy_"), "write", "chain")
    assert not is_pure(call)
    assert mutated_arguments(call) == [cache]
    assert mutation_between(graph, cache, mul, add) is call
    assert dead_code(graph) == 0
    assert same(run(program, *tensors), want)
    assert not torch.equal(want[2], tensors[0])


def test_a_region_of_nothing_but_a_write_survives_dead_code(build):
    program = cache_program(build)
    tensors = [torch.randn(2, 3), torch.randn(3)]
    want = run(program, *tensors)
    call = extract_region(program.graph_module, nodes_of(program, "select", "copy_"), "write", "chain")
    assert not call.users and call.meta["val"] == ()
    dead_code(program.graph_module.graph)
    assert same(run(program, *tensors), want)


def test_a_pure_region_goes_when_unused(build):
    program = build(lambda x: (x + 1, (x * 2).relu())[0], {"x": torch.randn(3)})
    call = extract_region(program.graph_module, nodes_of(program, "mul", "relu"), "unused", "pointwise")
    assert is_pure(call)
    assert dead_code(program.graph_module.graph) == 1


def test_results_of_a_region_that_alias_an_argument_lead_to_it(build):
    program = build(
        lambda c, x: (c.copy_(x).view(-1) + 1, x * 2),
        {"c": torch.zeros(2, 3), "x": torch.randn(2, 3)},
        c={"kind": "cache", "mutated": True},
    )
    c, add = nodes_of(program, "c", "add")
    inside = nodes_of(program, "copy_", "view")
    call = extract_region(program.graph_module, inside, "update", "chain")
    assert add.args[0] is call
    assert storage_root(call) is c


def test_nodes_that_others_stand_between_are_gathered(build):
    """``neg`` needs the first of the two and stands before the second: the region goes to the front."""
    program = build(lambda x: (x * 2, (x * 2).neg(), x + 3), {"x": torch.randn(3)})
    tensors = [torch.randn(3)]
    want = run(program, *tensors)
    extract_region(program.graph_module, nodes_of(program, "mul_1", "add"), "pair", "horizontal")
    program.graph_module.graph.lint()
    assert same(run(program, *tensors), want)


def test_a_node_that_must_stand_in_the_middle_is_named(build):
    program = build(lambda x: (x * 2).neg() + 1, {"x": torch.randn(3)})
    before = names_of(program.graph_module)
    with pytest.raises(CompileError, match="neg between them uses a result of theirs and neg gives them an argument"):
        extract_region(program.graph_module, nodes_of(program, "mul", "add"), "region_0", "pointwise")
    assert names_of(program.graph_module) == before and not hasattr(program.graph_module, "region_0")


@pytest.mark.parametrize(("inside", "moved"), [(("mul", "add_1"), "mul"), (("mul", "add", "add_1"), "add_1")])
def test_a_read_may_not_pass_a_write(build, inside, moved):
    """The cache is read before and after its write: neither read may change places with it."""
    program = cache_program(build)
    with pytest.raises(CompileError, match=f"{moved} cannot move into the region: it would pass copy_"):
        extract_region(program.graph_module, nodes_of(program, *inside), "region_0", "pointwise")


def test_what_cannot_be_a_region_is_refused(build):
    program = norm_program(build)
    graph_module = program.graph_module
    with pytest.raises(CompileError, match="x is a placeholder"):
        extract_region(graph_module, nodes_of(program, "x", "mul"), "region_0", "pointwise")
    with pytest.raises(CompileError, match="has no nodes"):
        extract_region(graph_module, [], "region_0", "pointwise")
    with pytest.raises(CompileError, match="'graph' is taken"):
        extract_region(graph_module, nodes_of(program, "mul"), "graph", "pointwise")
    with pytest.raises(CompileError, match="runs no region"):
        inline_region(graph_module, nodes_of(program, "mul")[0])


def test_regions_nest_and_come_apart(build):
    program = norm_program(build)
    tensors = [torch.randn(3, 4), torch.randn(4)]
    want = run(program, *tensors)
    inner = extract_region(program.graph_module, nodes_of(program, "add", "rsqrt"), "inner", "pointwise")
    outer = extract_region(program.graph_module, [*nodes_of(program, "mul", "mean"), inner], "outer", "chain")
    assert same(run(program, *tensors), want) and is_pure(outer)
    infer_all(program.graph_module)
    copied = inline_region(program.graph_module, outer)
    again = next(node for node in copied if node.op == "call_module")
    assert again.meta["region"] == "pointwise"
    inline_region(program.graph_module, again)
    assert same(run(program, *tensors), want)


def test_a_copy_shares_no_node_and_no_region(build):
    program = cache_program(build)
    extract_region(program.graph_module, nodes_of(program, "add", "select", "copy_"), "write", "chain")
    copy = copy_graph_module(program.graph_module)
    assert names_of(copy) == names_of(program.graph_module)
    for old, new in zip(program.graph_module.graph.nodes, copy.graph.nodes, strict=True):
        assert old is not new and old.meta == new.meta and old.meta is not new.meta
    assert copy.write is not program.graph_module.write
    tensors = [torch.randn(2, 3), torch.randn(3)]
    want = run(program, *tensors)
    for node in list(copy.write.graph.nodes):
        if node.target is ATEN.copy_.default:
            copy.write.graph.erase_node(node)
    copy.write.recompile()
    assert same(run(program, *tensors), want)
