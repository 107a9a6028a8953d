from dataclasses import replace

import pytest
import torch

from kimigraph.ir.descriptors import ConvDescriptor, IndexKeyDescriptor, StateDescriptor
from kimigraph.ir.errors import CompileError
from kimigraph.ir.fake import infer
from kimigraph.ir.regions import extract_region
from kimigraph.ir.verifier import verify

ATEN = torch.ops.aten
KEYS = str(IndexKeyDescriptor("contiguous", "float32", 8))


@pytest.fixture
def program(build):
    """A weight, a key cache that is written and read by the indexer, and an output."""

    def function(keys, w, x, index):
        written = keys.index_copy_(1, index, x)
        q = (x @ w).unsqueeze(2)
        return torch.ops.kimigraph.lightning_indexer(q, written, q[..., 0], k=3, scale=1.0, descriptor=KEYS), x * 2

    return build(
        function,
        {"keys": torch.zeros(1, 6, 8), "w": torch.randn(8, 8), "x": torch.randn(1, 1, 8), "index": torch.tensor([2])},
        keys={"kind": "cache", "source": "cache.0.index_key", "mutated": True, "descriptor": KEYS},
        w={"kind": "weight", "source": "layers.0.w"},
    )


def node(program, name):
    return next(n for n in program.graph_module.graph.nodes if n.name == name)


def insert(program, target, *args, before="output"):
    graph = program.graph_module.graph
    with graph.inserting_before(node(program, before)):
        made = graph.call_function(target, args)
    infer(made)
    return made


def refused(program, message):
    with pytest.raises(CompileError, match=r"^verifier: ") as caught:
        verify(program)
    assert message in str(caught.value)


def test_a_sound_program_passes(program):
    verify(program)
    extract_region(program.graph_module, [node(program, "mul")], "region_0", "pointwise")
    verify(program)


def test_an_argument_defined_later(program):
    output = node(program, "output")
    output.prepend(node(program, "x"))
    refused(program, "used before it has been defined")


def test_a_node_without_a_value(program):
    del node(program, "mul").meta["val"]
    refused(program, "node mul: has no meta['val']")


def test_a_node_without_a_value_inside_a_region(program):
    extract_region(program.graph_module, [node(program, "mul")], "region_0", "pointwise")
    del next(n for n in program.graph_module.region_0.graph.nodes if n.name == "mul").meta["val"]
    refused(program, "node mul: has no meta['val']")


def test_placeholders_are_the_inputs(program):
    swapped = (program.inputs[1], program.inputs[0], *program.inputs[2:])
    refused(replace(program, inputs=swapped), "node keys: the placeholder stands where the input w should be")
    refused(replace(program, inputs=program.inputs[:-1]), "node index: the placeholder stands where the input None")
    extra = (*program.inputs, replace(program.inputs[0], name="more"))
    refused(replace(program, inputs=extra), "node (none): the placeholder stands where the input more should be")


@pytest.mark.parametrize("change", [{"shape": (1, 7, 8)}, {"dtype": "bfloat16"}])
def test_placeholders_have_the_declared_shape_and_dtype(program, change):
    inputs = (replace(program.inputs[0], **change), *program.inputs[1:])
    refused(
        replace(program, inputs=inputs), "node keys: holds float32[1, 6, 8], the input cache.0.index_key is declared"
    )


def test_bound_tensors_have_the_declared_shape(program):
    refused(replace(program, tensors={"w": torch.zeros(8, 9)}), "node w: holds float32[8, 9]")


def test_outputs_are_the_declared_tensors(program):
    refused(replace(program, outputs=program.outputs[:1]), "want a tuple of 1 results")
    output = node(program, "output")
    output.args = (output.args[0][0],)
    refused(program, "want a tuple of 2 results")
    output.args = ((output.args[0], 3),)
    refused(program, "output output_1 is 3, want a tensor")


def test_targets_outside_the_language(program):
    insert(program, torch.nn.functional.relu, node(program, "x"))
    refused(program, "which is no operator of torch.ops")


def test_tensor_methods_are_refused(program):
    with program.graph_module.graph.inserting_before(node(program, "output")):
        made = program.graph_module.graph.call_method("relu", (node(program, "x"),))
    infer(made)
    refused(program, "calls the tensor method relu")


def test_modules_other_than_regions_are_refused(program):
    program.graph_module.add_submodule("linear", torch.nn.Linear(8, 8))
    with program.graph_module.graph.inserting_before(node(program, "output")):
        made = program.graph_module.graph.call_module("linear", (node(program, "x"),))
    made.meta["val"] = node(program, "x").meta["val"]
    refused(program, "only regions (graph modules) can be called")


def test_a_write_to_a_weight(program):
    insert(program, ATEN.mul_.Tensor, node(program, "w"), 2)
    refused(program, "writes the weight layers.0.w")


def test_a_write_to_a_weight_through_a_view_in_a_region(program):
    view = insert(program, ATEN.view.default, node(program, "w"), [-1])
    write = insert(program, ATEN.zero_.default, view)
    extract_region(program.graph_module, [view, write], "region_0", "chain")
    refused(program, "node region_0: writes the weight layers.0.w")


def test_a_write_to_an_undeclared_input(program):
    insert(program, ATEN.zero_.default, node(program, "x"))
    refused(program, "writes the input x, which is not declared mutated")


def test_a_lost_cache_update(program):
    """The fault of a rewrite that drops the write in front of the operator it makes."""
    write = node(program, "index_copy_")
    write.replace_all_uses_with(node(program, "keys"))
    program.graph_module.graph.erase_node(write)
    refused(program, "node keys: the input cache.0.index_key is declared mutated and nothing writes it")


def test_a_reader_with_another_descriptor(program):
    indexer = node(program, "lightning_indexer")
    other = str(IndexKeyDescriptor("paged", "float32", 8, 64))
    indexer.kwargs = {**indexer.kwargs, "descriptor": other}
    refused(program, f"lightning_indexer takes keys as {other}, but the cache cache.0.index_key is {KEYS}")
    indexer.kwargs = {key: value for key, value in indexer.kwargs.items() if key != "descriptor"}
    refused(program, "takes keys as undescribed")


def test_a_recorded_value_that_the_operator_does_not_give(program):
    indexer = node(program, "lightning_indexer")
    indexer.kwargs = {**indexer.kwargs, "k": 4}
    refused(program, "node lightning_indexer: holds int32[1, 1, 3], its operator gives int32[1, 1, 4]")


def test_operands_that_the_operator_refuses(program):
    indexer = node(program, "lightning_indexer")
    indexer.kwargs = {**indexer.kwargs, "scale": -1.0}
    with pytest.raises(CompileError, match=r"lightning_indexer.*want scale > 0"):
        verify(program)


@pytest.mark.parametrize(
    ("operand", "descriptor", "message"),
    [
        ("state", StateDescriptor("vk", "float32", 2, 4, 4), "reads the state as 'kv', the cache is state{layout=vk"),
        ("conv_state", ConvDescriptor(24, 4, 6), "reads 3 columns, the cache is conv{channels=24"),
    ],
)
def test_kda_states_are_read_as_they_are_kept(build, operand, descriptor, message):
    """With K = V = 4 a swapped state has the right shape."""
    tensors = {
        "qkv": torch.randn(1, 1, 24),
        "conv_weight": torch.randn(24, 4),
        "conv_state": torch.randn(1, 24, 3),
        "gate": torch.randn(1, 1, 8),
        "dt_bias": torch.randn(8),
        "a_log": torch.randn(2),
        "beta": torch.randn(1, 1, 2),
        "state": torch.randn(1, 2, 4, 4),
    }
    program = build(
        lambda *given: torch.ops.kimigraph.kda_decode(*given, scale=0.5),
        tensors,
        state={"kind": "cache", "mutated": True},
        conv_state={"kind": "cache", "mutated": True},
    )
    verify(program)
    inputs = tuple(
        replace(spec, descriptor=str(descriptor)) if spec.name == operand else spec for spec in program.inputs
    )
    refused(replace(program, inputs=inputs), message)
