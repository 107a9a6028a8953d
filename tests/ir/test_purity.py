import operator

import pytest
import torch
from torch.fx import Graph, GraphModule, Node

from kimigraph.ir.purity import dead_code, is_pure, mutated_arguments, mutation_between, storage_root

ATEN = torch.ops.aten


def call(graph, target, *args, **kwargs):
    return graph.call_function(target, args, kwargs)


@pytest.fixture
def graph():
    return Graph()


def run(graph, *tensors):
    return GraphModule(torch.nn.Module(), graph)(*tensors)


@pytest.mark.parametrize(
    ("target", "arguments", "pure"),
    [
        (ATEN.add.Tensor, (1,), True),
        (ATEN.view.default, ([-1],), True),
        (ATEN.empty_like.default, (), True),
        (ATEN.add_.Tensor, (1,), False),
        (ATEN.dropout.default, (0.5, True), False),
        (ATEN.dropout.default, (0.5, False), True),
        (ATEN.dropout.default, (0.0, True), True),
        (ATEN.native_dropout.default, (0.5, False), True),
        (ATEN.native_dropout.default, (0.5, True), False),
        (ATEN.bernoulli.default, (), False),
        (ATEN.rand_like.default, (), False),
        (ATEN._assert_tensor_metadata.default, (), False),
        (ATEN._assert_async.default, (), False),
        (ATEN._functional_assert_async.msg, ("m", None), False),
        (ATEN.sym_size.int, (0,), True),
        (operator.getitem, (0,), True),
        (operator.setitem, (0, 1), False),
        (operator.iadd, (1,), False),
        (print, (), False),
        (torch.ops._c10d_functional.all_reduce.default, ("sum", "group"), False),
    ],
)
def test_purity_of_a_call(graph, target, arguments, pure):
    x = graph.placeholder("x")
    assert is_pure(call(graph, target, x, *arguments)) is pure


def test_attention_is_pure_exactly_when_it_drops_nothing(graph):
    q, k, v = (graph.placeholder(name) for name in "qkv")
    sdpa = ATEN.scaled_dot_product_attention.default
    assert is_pure(call(graph, sdpa, q, k, v))
    assert is_pure(call(graph, sdpa, q, k, v, dropout_p=0.0))
    assert is_pure(call(graph, sdpa, q, k, v, None, 0.0))
    assert not is_pure(call(graph, sdpa, q, k, v, dropout_p=0.1))
    assert not is_pure(call(graph, sdpa, q, k, v, None, 0.1))


def test_semantic_operators_say_what_they_write(graph):
    names = "qkv conv_weight conv_state gate dt_bias a_log beta state".split()
    arguments = [graph.placeholder(name) for name in names]
    kda = call(graph, torch.ops.kimigraph.kda_decode.default, *arguments, scale=1.0)
    assert [node.name for node in mutated_arguments(kda)] == ["conv_state", "state"]
    assert not is_pure(kda)
    assert storage_root(kda) is kda
    indexer = call(graph, torch.ops.kimigraph.lightning_indexer.default, *arguments[:3], k=4, scale=1.0)
    assert is_pure(indexer) and mutated_arguments(indexer) == []
    write = call(
        graph, torch.ops.kimigraph.latent_write.default, arguments[0], None, *arguments[1:2], None, arguments[2]
    )
    assert [node.name for node in mutated_arguments(write)] == ["qkv"]
    assert not is_pure(write)


def test_lists_and_out_arguments_are_found(graph):
    a, b, c = (graph.placeholder(name) for name in "abc")
    assert mutated_arguments(call(graph, ATEN._foreach_add_.List, [a, b], [c, c])) == [a, b]
    out = call(graph, ATEN.add.out, a, b, out=c)
    assert mutated_arguments(out) == [c]
    assert storage_root(out) is c
    assert mutated_arguments(call(graph, ATEN.index_put_.default, a, [b], c)) == [a]


def test_a_function_of_unknown_behaviour_writes_everything(graph):
    a, b = graph.placeholder("a"), graph.placeholder("b")
    node = call(graph, torch.nn.functional.relu, a, b)
    assert not is_pure(node) and mutated_arguments(node) == [a, b]


@pytest.mark.parametrize(
    ("target", "arguments"),
    [
        (ATEN.view.default, ([4],)),
        (ATEN.transpose.int, (0, 1)),
        (ATEN.slice.Tensor, (0, 1, 2)),
        (ATEN.select.int, (0, 1)),
        (ATEN.expand.default, ([2, 4],)),
        (ATEN.reshape.default, ([4],)),
        (ATEN._unsafe_view.default, ([4],)),
        (ATEN.view.dtype, (torch.int32,)),
        (ATEN.dropout.default, (0.5, False)),
        (ATEN.detach.default, ()),
        (ATEN.contiguous.default, ()),
        (ATEN.index_copy_.default, (0, None, None)),
    ],
)
def test_views_and_in_place_results_lead_to_their_root(graph, target, arguments):
    x = graph.placeholder("x")
    first = call(graph, target, x, *arguments)
    assert storage_root(call(graph, ATEN.alias.default, first)) is x
    clone = call(graph, ATEN.clone.default, first)
    assert storage_root(clone) is clone


def test_items_of_split_and_topk(graph):
    x = graph.placeholder("x")
    pieces = call(graph, ATEN.split.Tensor, x, 2)
    assert storage_root(call(graph, operator.getitem, pieces, 3)) is x
    best = call(graph, ATEN.topk.default, x, 2)
    item = call(graph, operator.getitem, best, 1)
    assert storage_root(item) is item
    minimum, maximum = graph.placeholder("minimum"), graph.placeholder("maximum")
    both = call(graph, ATEN.aminmax.out, x, min=minimum, max=maximum)
    assert storage_root(call(graph, operator.getitem, both, 1)) is maximum


def test_dead_code_keeps_every_write(graph):
    """Torch's own elimination deletes method calls that write: three states come out unchanged."""
    state, cache, buffer, index, value = (graph.placeholder(n) for n in ("state", "cache", "buffer", "index", "value"))
    graph.call_method("mul_", (state, 0.5))
    graph.call_method("index_copy_", (cache, 0, index, value))
    view = call(graph, ATEN.view.default, buffer, [4])
    call(graph, ATEN.copy_.default, view, value)
    unused = call(graph, ATEN.add.Tensor, value, 1)
    call(graph, ATEN.mul.Tensor, unused, 2)
    call(graph, ATEN._assert_tensor_metadata.default, value)
    graph.output(value)
    assert dead_code(graph) == 2
    tensors = [torch.ones(4), torch.zeros(6), torch.zeros(2, 2), torch.tensor([5, 4, 3, 2]), torch.arange(4.0)]
    run(graph, *tensors)
    assert torch.equal(tensors[0], torch.full((4,), 0.5))
    assert torch.equal(tensors[1], torch.tensor([0.0, 0, 3, 2, 1, 0]))
    assert torch.equal(tensors[2].flatten(), torch.arange(4.0))


def test_dead_code_drops_attention_that_torch_keeps(graph):
    q = graph.placeholder("q")
    call(graph, ATEN.scaled_dot_product_attention.default, q, q, q)
    graph.output(q)
    assert dead_code(graph) == 1
    assert [node.op for node in graph.nodes] == ["placeholder", "output"]


def test_a_mutation_between_two_reads_is_found(graph):
    """``a = c * 2; c += 1; a + c`` must not become ``c * 3``."""
    c = graph.placeholder("c")
    a = call(graph, ATEN.mul.Tensor, c, 2)
    write = call(graph, ATEN.add_.Tensor, c, 1)
    result = call(graph, ATEN.add.Tensor, a, c)
    graph.output(result)
    assert mutation_between(graph, c, a, result) is write
    assert mutation_between(graph, c, write, result) is None
    assert mutation_between(graph, a, a, result) is None


def test_a_mutation_through_an_alias_is_found(graph):
    c = graph.placeholder("c")
    view = call(graph, ATEN.select.int, c, 0, 0)
    first = call(graph, ATEN.mul.Tensor, c, 2)
    write = call(graph, ATEN.zero_.default, view)
    last = call(graph, ATEN.add.Tensor, first, c)
    assert mutation_between(graph, c, first, last) is write
    assert mutation_between(graph, view, first, last) is write


def test_a_dtype_view_read_before_a_write_to_its_base(graph):
    """``y = x.view(int32) * 2; x[:, 2:5] = 2`` : the reader of the view may not move behind the write."""
    x = graph.placeholder("x")
    bits = call(graph, ATEN.view.dtype, x, torch.int32)
    y = call(graph, ATEN.mul.Tensor, bits, 2)
    part = call(graph, ATEN.slice.Tensor, x, 1, 2, 5)
    write = call(graph, ATEN.fill_.Scalar, part, 2.0)
    end = graph.output(y)
    assert mutation_between(graph, bits, y, end) is write


def test_the_overwrite_of_a_copied_input_is_no_mutation_of_the_copy(graph):
    """``y = slice_scatter(x, s); x.zero_(); return y``: y keeps the old values, x itself is written."""
    x, s = graph.placeholder("x"), graph.placeholder("s")
    y = call(graph, ATEN.slice_scatter.default, x, s, 0, 1, 3)
    write = call(graph, ATEN.zero_.default, x)
    end = graph.output(y)
    assert mutation_between(graph, x, y, end) is write
    assert mutation_between(graph, y, y, end) is None


def test_mutation_between_wants_the_nodes_in_order(graph):
    x = graph.placeholder("x")
    a = call(graph, ATEN.neg.default, x)
    b = call(graph, ATEN.neg.default, a)
    graph.output(b)
    with pytest.raises(ValueError, match="does not stand before"):
        mutation_between(graph, x, b, a)


def test_a_cache_write_in_front_of_indexer_and_attention_survives(graph):
    """The write has no user but the operators that read its result; replacing those must not lose it."""
    keys, index, new, q, w = (graph.placeholder(name) for name in ("keys", "index", "new", "q", "w"))
    written = call(graph, ATEN.index_copy_.default, keys, 1, index, new)
    call(graph, torch.ops.kimigraph.lightning_indexer.default, q, written, w, k=2, scale=1.0)
    graph.output(q)
    assert dead_code(graph) == 1
    assert [node.target for node in graph.nodes if node.op == "call_function"] == [ATEN.index_copy_.default]


def test_a_buffer_that_is_written_often_is_walked_once() -> None:
    """Four thousand writes in a row: each step of the chain is asked for once, not once a node behind it."""
    graph = Graph()
    buffer, value = graph.placeholder("buffer"), graph.placeholder("value")
    node = buffer
    for _ in range(4000):
        node = graph.call_function(torch.ops.aten.add_.Tensor, (node, value))
    graph.output((node,))
    known: dict[Node, Node] = {}
    asked = [storage_root(item, known) for item in graph.nodes if item.op == "call_function"]
    assert asked == [buffer] * 4000 and len(known) == 4001
    assert mutation_between(graph, buffer, value, node) is value.next


@pytest.mark.parametrize("writes_only", [True, False])
def test_a_region_s_results_and_one_that_has_none(writes_only):
    """A region may write and return nothing: it shares no storage, and its writes are found."""
    inner = Graph()
    cache, value = inner.placeholder("cache"), inner.placeholder("value")
    written = call(inner, torch.ops.aten.copy_.default, cache, value)
    inner.output(() if writes_only else (written,))
    outer = Graph()
    target, source = outer.placeholder("target"), outer.placeholder("source")
    region = outer.call_module("region", (target, source))
    outer.output((target,))
    root = torch.nn.Module()
    root.add_module("region", GraphModule(torch.nn.Module(), inner))
    module = GraphModule(root, outer)
    region = next(node for node in module.graph.nodes if node.op == "call_module")
    assert [node.name for node in mutated_arguments(region)] == ["target"]
    assert storage_root(region).name == ("region" if writes_only else "target")
