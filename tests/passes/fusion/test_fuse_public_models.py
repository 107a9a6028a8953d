"""Which sites of the public models fuse, that the old operators are gone, and that the numbers stay."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx import Node

from kimigraph.passes.canonicalize import Canonicalize
from kimigraph.passes.raise_kda import RaiseKda

ATEN = torch.ops.aten
MakeStep = Callable[..., Any]

ATTENTIONS = (ATEN.scaled_dot_product_attention.default, ATEN.scatter_add.default, ATEN.conv1d.default)
COUNTS = {
    "deepseek_v32": {"lightning_indexer": 2, "sparse_attention": 2},
    "glm5_next": {"lightning_indexer": 1, "sparse_attention": 1, "kda_decode": 1},
    "kimi_k31": {"lightning_indexer": 1, "sparse_attention": 1, "kda_decode": 1},
    "kimi_linear": {"latent_attention": 1, "kda_decode": 1},
}
ROUTING = {"deepseek_v32": (3, 1), "glm5_next": (3, 1), "kimi_k31": (1, 0), "kimi_linear": (3, 1)}
"""top-k and scatter nodes of the expert routers, which stay."""

CASES = [
    ("deepseek_v32", "sdpa"),
    ("deepseek_v32", "eager"),
    ("glm5_next", "sdpa"),
    ("glm5_next", "eager"),
    ("kimi_k31", "eager"),
    ("kimi_linear", "sdpa"),
    ("kimi_linear", "eager"),
]


def require_old_anchors_gone(step: Any, model: str) -> None:
    topk, scatter = ROUTING[model]
    assert step.count(ATEN.topk.default) == topk
    assert step.count(ATEN.scatter.value) == scatter
    assert step.count(*ATTENTIONS, ATEN.relu.default, ATEN.slice_scatter.default) == 0
    softmaxes = [node.meta["val"].shape for node in step.graph.nodes if node.target is ATEN.softmax.int]
    assert not [sizes for sizes in softmaxes if len(sizes) == 4 and sizes[-1] == 64]


@pytest.mark.parametrize(("model", "attention"), CASES)
def test_every_site_is_fused_and_nothing_else_changes(model: str, attention: str, step: MakeStep) -> None:
    fused = step(model, attention)
    remarks = fused.fuse()
    assert fused.fused() == COUNTS[model]
    require_old_anchors_gone(fused, model)
    assert sum(remark.kind == "passed" for remark in remarks) == sum(COUNTS[model].values())
    assert not [remark for remark in remarks if remark.kind == "missed"]
    assert fused.error() < 1e-5


@pytest.mark.parametrize("model", ["glm5_next", "kimi_k31", "kimi_linear"])
def test_marks_change_nothing_in_decode(model: str, step: MakeStep) -> None:
    fused = step(model, "eager", marks=False)
    fused.fuse()
    assert fused.fused() == COUNTS[model]
    require_old_anchors_gone(fused, model)


@pytest.mark.parametrize("model", ["glm5_next", "kimi_k31"])
def test_a_marked_prefill_takes_raw_gates(model: str, step: MakeStep) -> None:
    marked = step(model, "sdpa", options={"phase": "prefill", "tokens": 20})
    remarks = marked.fuse((Canonicalize(), RaiseKda()))
    assert [(remark.kind, remark.via) for remark in remarks] == [("passed", "mark")]
    node = marked.operator("kda_prefill")
    rate, bias = node.args[6:8]
    assert isinstance(rate, Node) and rate.op == "placeholder" and isinstance(bias, Node)
    assert node.kwargs["lower_bound"] == -5.0
    assert marked.count(ATEN.exp.default, ATEN.softplus.default) == 0


def test_remarks_name_old_anchors_and_the_new_node(step: MakeStep) -> None:
    fused = step("kimi_k31", "eager")
    by_pass = {remark.pass_name: remark for remark in fused.fuse()}
    for name, operator, anchors in (
        ("fuse-lightning-indexer", "lightning_indexer", {"topk", "relu"}),
        ("fuse-sparse-attention", "sparse_attention", {"softmax"}),
        ("raise-kda", "kda_decode", {"conv1d", "silu"}),
    ):
        remark = by_pass[name]
        assert remark.via == "pattern" and remark.node == fused.operator(operator).name == remark.nodes[-1]
        assert anchors <= {node.rstrip("_0123456789") for node in remark.nodes}
        assert remark.source.rpartition(":")[0].endswith(".py")
    picks = fused.operator("lightning_indexer")
    assert picks.meta["selects"] in picks.meta["replaces"]


def test_operators_carry_the_descriptors_of_their_caches(step: MakeStep) -> None:
    fused = step("kimi_k31", "eager")
    fused.fuse()
    assert fused.operator("lightning_indexer").kwargs["descriptor"].startswith("index_key{layout=contiguous")
    assert fused.operator("sparse_attention").kwargs["descriptor"].startswith("latent{layout=contiguous")
    assert fused.operator("kda_decode").kwargs["state_layout"] == "vk"


def test_a_list_of_unknown_origin_is_noted(step: MakeStep) -> None:
    fused = step("glm5_next", "sdpa")
    notes = [remark for remark in fused.fuse() if remark.kind == "note"]
    assert len(notes) == 1 and "name no key twice" in notes[0].message


def test_the_length_is_read_before_the_counter_steps(step: MakeStep) -> None:
    fused = step("deepseek_v32", "sdpa")
    fused.fuse()
    lengths = {fused.operator("lightning_indexer", index).args[3] for index in range(2)}
    assert len(lengths) == 1, "all layers share one length"
    length = lengths.pop()
    steps = [node for node in fused.graph.nodes if node.target is ATEN.add_.Tensor and node.args[0] is length.args[0]]
    assert len(steps) == 1 and length < steps[0]


def test_weights_are_used_as_they_are(step: MakeStep) -> None:
    """Absorption reads the expanding weight through views: no copy, no new constant."""
    fused = step("kimi_k31", "eager")
    before = set(fused.program.tensors)
    fused.fuse()
    weight = next(n for n in fused.graph.nodes if n.op == "placeholder" and "kv_b_proj" in n.name)
    assert [user.target for user in weight.users] == [ATEN.view.default]
    assert set(fused.program.tensors) == before
