"""``insert-quantization``: units as a whole or not at all, what a policy leaves alone, what does not fit."""

import operator
from dataclasses import replace

import pytest
import torch
from torch.fx import Interpreter

from kimigraph.ir.cache_formats import cache_bill, given_to, left_in
from kimigraph.ir.config import CompileConfig
from kimigraph.ir.errors import CompileError
from kimigraph.ir.operators import OPERATORS
from kimigraph.ir.reference.mxfp4_quantize import mxfp4_rounded
from kimigraph.ir.script import make_inputs
from kimigraph.ir.verifier import verify
from kimigraph.passes import PassContext, Pipeline, run_pipeline

LATENT_ONLY = """
[roles]
latent = { format = "fp8", group = 16, scales = "power2", order = "scales_rope" }
"""
INDEX = '[roles]\nindex_query = {{ format = "{0}", group = {1} }}\nindex_key = {{ format = "{0}", group = {1} }}\n'


def calls(program, name):
    return [node for node in program.graph_module.graph.nodes if node.target is OPERATORS[name].overload]


def spec_of(program, source):
    return next(spec for spec in program.inputs if spec.source == source)


def test_off_leaves_everything(quantise, fused):
    program, record = quantise("off")
    assert not record.result.modified and program.inputs == fused.inputs and record.result.remarks == ()


@pytest.mark.parametrize("policy", ["article", "deepseek"])
def test_inputs_writers_and_readers_change_together(quantise, fused, policy):
    program, record = quantise(policy)
    latent, key = spec_of(program, "cache.3.latent"), spec_of(program, "cache.3.index_key")
    assert latent.dtype == key.dtype == "uint8" and latent.parts == (
        ("cache.3.latent", "float32"),
        ("cache.3.rope", "float32"),
    )
    assert "cache.3.rope" not in {spec.source for spec in program.inputs}
    for name in ("latent_write", "sparse_attention"):
        [node] = calls(program, name)
        assert node.kwargs["descriptor"] == latent.descriptor
    for name in ("index_key_write", "lightning_indexer"):
        [node] = calls(program, name)
        assert node.kwargs["descriptor"] == key.descriptor
    [indexer] = calls(program, "lightning_indexer")
    quantisers = calls(program, "fp8_quantize"), calls(program, "mxfp8_quantize")
    # MXFP8 queries that one indexer reads it quantises itself; those of whole heads have their scales in the weights.
    assert [len(some) for some in quantisers] == ([0, 0] if policy == "article" else [1, 0])
    assert bool(indexer.kwargs.get("quantises_q")) == (policy == "article") and indexer.meta["selects"]
    assert program.in_spec.num_leaves == fused.in_spec.num_leaves - 1
    assert len(program.info["argument_leaves"]) == program.in_spec.num_leaves
    assert [remark.kind for remark in record.result.remarks] == ["passed", "passed", "note"]
    assert {item["role"] for item in program.info["quantization"]} == {"latent", "rope", "index_key", "index_query"}


def test_a_second_run_does_nothing(quantise):
    """G10."""
    program, _ = quantise("article")
    text, records = str(program.graph_module.graph), list(program.info["quantization"])
    _, again = quantise("article", program)
    assert not again.result.modified
    assert str(program.graph_module.graph) == text and program.info["quantization"] == records


def test_one_query_of_two_indexers_is_quantised_once(quantise, fused):
    """G10: the reader of a second cache with the same query takes the same codes."""
    program = fused.copy()
    graph = program.graph_module.graph
    [indexer] = calls(program, "lightning_indexer")
    with graph.inserting_after(indexer):
        twin = graph.node_copy(indexer)
    twin.meta = dict(indexer.meta)
    output = graph.output_node()
    output.args = ((*output.args[0], twin),)
    program.outputs = (*program.outputs, replace(program.outputs[0], name=twin.name, source="twin"))
    program, _ = quantise("article", program)
    assert len(calls(program, "mxfp8_quantize")) == 1 and len(calls(program, "lightning_indexer")) == 2


def rotated(kind):
    return "rotation = 'hadamard'\n" + INDEX.format(kind, 32)


def outputs(program, named):
    given = [tensor.clone() for tensor in given_to(program.inputs, named)]
    with torch.no_grad():
        return Interpreter(program.graph_module).run(*given)


@pytest.mark.parametrize("kind", ["mxfp8", "fp8"])
def test_the_rotation_of_queries_goes_into_their_weight(quantise, fused, kind):
    """The keys are turned as they are written, the queries as their product is: nothing turns at run time."""
    program, _ = quantise(rotated(kind))
    [turned], [indexer] = calls(program, "hadamard_rows"), calls(program, "lightning_indexer")
    assert turned.meta["prepared"] and turned.args[0].name.endswith("indexer_wq_b_weight")
    assert indexer.kwargs["descriptor"].endswith("rotation=hadamard}")
    assert not any(node.kwargs.get("rotate") for node in calls(program, f"{kind}_quantize"))
    tensors = make_inputs(fused.inputs, {}, 3)
    named = {spec.source: tensor for spec, tensor in zip(fused.inputs, tensors, strict=True)}
    plain = quantise(INDEX.format(kind, 32))[0]
    names = [spec.source for spec in program.outputs]
    got, want = outputs(program, named), outputs(plain, named)
    assert names and (got[0] - want[0]).norm() / want[0].norm() < 0.2


def test_a_query_that_something_else_reads_is_turned_by_its_quantiser(quantise, fused):
    program = fused.copy()
    graph = program.graph_module.graph
    [indexer] = calls(program, "lightning_indexer")
    product = indexer.args[0].args[0]
    with graph.inserting_after(product):
        total = graph.call_function(torch.ops.aten.sum.default, (product,))
    total.meta["val"] = product.meta["val"].sum()
    output = graph.output_node()
    output.args = ((*output.args[0], total),)
    program.outputs = (*program.outputs, replace(program.outputs[0], name=total.name, source="total"))
    program, _ = quantise(rotated("mxfp8"), program)
    [quantiser], [indexer] = calls(program, "mxfp8_quantize"), calls(program, "lightning_indexer")
    assert quantiser.kwargs["rotate"] and "quantises_q" not in indexer.kwargs and not calls(program, "hadamard_rows")


def run(program, tensors):
    with torch.no_grad():
        return Interpreter(program.graph_module).run(*tensors)


@pytest.mark.parametrize("policy", ["article", "deepseek"])
def test_pages_are_quantised_page_by_page(quantise, fused, policy):
    """The paged layout under a policy: planes of a page's keys and scales, found through the same block table."""
    program = fused.copy()
    paged = CompileConfig(target="cpu:reference", batch=2, context=32, cache_layout="paged", page_size=8)
    run_pipeline(program, Pipeline.parse("page-caches"), PassContext(paged))
    program, record = quantise(policy, program)
    latent, key = spec_of(program, "cache.3.latent"), spec_of(program, "cache.3.index_key")
    assert latent.shape == (9, 8, 68) and key.shape[:2] == (9, 8) and {latent.dtype, key.dtype} == {"uint8"}
    assert all("layout=paged" in spec.descriptor and "page_size=8" in spec.descriptor for spec in (latent, key))
    for name in ("latent_write", "index_key_write", "lightning_indexer"):
        [node] = calls(program, name)
        assert node.kwargs["block_table"] is program.placeholders["block_table"]
    assert record.result.statistics["quantised"] == 2


def test_latents_alone_leave_the_picks_bit_by_bit(quantise, fused):
    """G11: no bit of the indexer changes where its roles are not named."""
    program, record = quantise(LATENT_ONLY)
    assert calls(program, "lightning_indexer")[0].kwargs == calls(fused, "lightning_indexer")[0].kwargs
    assert not calls(program, "mxfp8_quantize") and not calls(program, "fp8_quantize")
    assert "index key: policy 'custom' keeps it, bit for bit" in [remark.message for remark in record.result.remarks]
    keys = spec_of(program, "cache.3.index_key")
    assert keys == spec_of(fused, "cache.3.index_key")
    tensors = make_inputs(fused.inputs, {}, 3)
    named = {spec.source: tensor for spec, tensor in zip(fused.inputs, tensors, strict=True)}
    given = given_to(program.inputs, named)
    given = [t.clone() for t in given]
    run(fused, tensors)
    run(program, given)
    after = dict(zip((spec.source for spec in program.inputs), given, strict=True))
    assert torch.equal(after["cache.3.index_key"], named["cache.3.index_key"])  # which fused wrote in place


@pytest.mark.parametrize("policy", ["article", "deepseek", LATENT_ONLY])
def test_the_quantised_step_stays_close(quantise, fused, policy):
    program, _ = quantise(policy)
    tensors = make_inputs(fused.inputs, {}, 5)
    named = {spec.source: t.clone() for spec, t in zip(fused.inputs, tensors, strict=True)}
    given = [t.clone() for t in given_to(program.inputs, named)]
    run(fused, tensors)
    run(program, given)
    after, wanted = (
        left_in(program.inputs, given, named),
        dict(zip((spec.source for spec in fused.inputs), tensors, strict=True)),
    )
    for name in ("cache.3.latent", "cache.3.rope", "cache.3.index_key"):
        error = (after[name].float() - wanted[name]).norm() / wanted[name].norm()
        assert error < 0.05, (name, error)


@pytest.mark.parametrize(
    ("policy", "reason", "done"),
    [
        (INDEX.format("fp8", 16), "keys of 32 are more than one group of 16", 0),
        ('[roles]\nlatent = { format = "fp8", group = 24 }\n', "rows of 32 are no multiple of the tile of 24", 0),
        (INDEX.format("mxfp8", 24), "", 1),
    ],
)
def test_formats_that_do_not_fit_are_refused(quantise, policy, reason, done):
    program, record = quantise(policy)
    missed = [remark for remark in record.result.remarks if remark.kind == "missed"]
    assert record.result.statistics["quantised"] == done and bool(missed) == (not done)
    if reason:
        assert reason in missed[0].message and missed[0].remedy
        assert all(not spec.parts for spec in program.inputs)


def test_a_cache_that_something_else_reads_stays_as_it_is(quantise, fused):
    program = fused.copy()
    graph = program.graph_module.graph
    cache = program.placeholders["cache_3_index_key"]
    output = graph.output_node()
    with graph.inserting_before(output):
        total = graph.call_function(torch.ops.aten.sum.default, (cache,))
    total.meta["val"] = cache.meta["val"].sum()
    output.args = ((*output.args[0], total),)
    program.outputs = (*program.outputs, replace(program.outputs[0], name=total.name, source="total"))
    program, record = quantise("article", program)
    [missed] = [remark for remark in record.result.remarks if remark.kind == "missed"]
    assert "cache.3.index_key is also used by sum" in missed.message and "aten.sum" in missed.message
    assert spec_of(program, "cache.3.index_key").dtype == "float32" and not calls(program, "mxfp8_quantize")
    assert spec_of(program, "cache.3.latent").dtype == "uint8"


def test_a_reader_of_another_order_than_the_writer_fails_to_compile(quantise):
    program, _ = quantise("article")
    [reader] = calls(program, "sparse_attention")
    text = reader.kwargs["descriptor"]
    assert "order=rope_scales" in text
    reader.kwargs = {**reader.kwargs, "descriptor": text.replace("rope_scales", "scales_rope")}
    with pytest.raises(CompileError, match=r"sparse_attention takes latent as .*scales_rope.*rope_scales"):
        verify(program)


def test_bytes_of_a_token(quantise):
    program, _ = quantise("article")
    assert cache_bill(program.inputs) == {
        "cache_bytes_per_token": 32 + 4 + 32 + 32 + 1,
        "cache_bytes_per_token_bf16": 2 * (32 + 16 + 32),
    }


PACKED = '[roles]\nexperts = "mxfp4"\n'


def test_experts_are_packed_when_they_are_bound(quantise, fused):
    """Alone, without a cache that changes; a second run does nothing; the graph computes what MXFP4 leaves."""
    program, record = quantise(PACKED)
    packs, experts = calls(program, "mxfp4_quantize"), calls(program, "moe_experts")
    assert len(packs) == 2 * len(experts) == 6 and all(node.meta["prepared"] for node in packs)
    assert program.inputs == fused.inputs
    for node in experts:
        assert node.args[3] in packs and node.args[4] in packs and node.meta["selects"]
    assert [remark.kind for remark in record.result.remarks] == ["passed"] * 3 + ["note"] * 3
    assert {item["role"] for item in program.info["quantization"]} == {"experts"}
    assert not quantise(PACKED, program)[1].result.modified
    verify(program)
    tensors = make_inputs(fused.inputs, {}, 3)
    named = {spec.source: tensor for spec, tensor in zip(fused.inputs, tensors, strict=True)}
    rounded = {
        name: mxfp4_rounded(tensor) if name.endswith(("experts.gate_up_proj", "experts.down_proj")) else tensor
        for name, tensor in named.items()
    }
    for found, wanted in zip(outputs(program, named), outputs(fused, rounded), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_experts_that_cannot_be_packed_stay(quantise, fused):
    program = fused.copy()
    first, second, _ = calls(program, "moe_experts")
    graph = program.graph_module.graph
    with graph.inserting_after(second):
        twin = graph.node_copy(second)  # reads the same weights
    with graph.inserting_after(twin):
        result = graph.call_function(operator.getitem, (twin, 0))
    twin.meta, result.meta = dict(second.meta), {"val": second.meta["val"][0]}
    weight = first.args[4]
    with graph.inserting_before(first):
        doubled = graph.call_function(torch.ops.aten.mul.Tensor, (weight, 2.0))
    doubled.meta = {"val": weight.meta["val"]}
    first.update_arg(4, doubled)
    graph.output_node().args = ((*graph.output_node().args[0], result),)
    program.outputs = (*program.outputs, replace(program.outputs[0], name=result.name, source="twin"))
    program, record = quantise(PACKED, program)
    missed = [remark.message for remark in record.result.remarks if remark.kind == "missed"]
    assert len(missed) == 3 and len(calls(program, "mxfp4_quantize")) == 2
    assert "down is no weight of the model as it lies" in missed[0]
    assert all("gate_up is read by" in text for text in missed[1:])
