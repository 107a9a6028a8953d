"""What must not be fused: each near miss is refused, with the node at fault, and the graph keeps its numbers."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx import Interpreter, Node

from kimigraph.ir.config import CompileConfig
from kimigraph.ir.fake import infer
from kimigraph.ir.operators import OPERATORS
from kimigraph.ir.purity import dead_code
from kimigraph.ir.remarks import Remark
from kimigraph.ir.script import make_inputs
from kimigraph.passes.base import PassContext
from kimigraph.passes.canonicalize import Canonicalize
from kimigraph.passes.fuse_lightning_indexer import FuseLightningIndexer
from kimigraph.passes.fuse_sparse_attention import FuseSparseAttention
from kimigraph.passes.raise_kda import RaiseKda

ATEN = torch.ops.aten
MakeStep = Callable[..., Any]


@pytest.fixture
def kimi(step: MakeStep) -> Any:
    """The canonical K3.1 step: one KDA layer, one sparse layer."""
    made = step("kimi_k31", "eager")
    made.fuse((Canonicalize(),))
    return made


def nodes(step: Any, target: Any) -> list[Node]:
    return [node for node in step.graph.nodes if node.target is target]


def indexer_topk(step: Any) -> Node:
    return next(node for node in nodes(step, ATEN.topk.default) if node.args[0].meta["val"].dim() == 3)


def add(step: Any, before: Node, target: Any, *args: Any, **kwargs: Any) -> Node:
    with step.graph.inserting_before(before):
        node = step.graph.call_function(target, args, kwargs)
    infer(node)
    return node


def add_output(step: Any, node: Node) -> None:
    output = step.graph.output_node()
    output.args = ((*output.args[0], node),)


def apply(step: Any, *passes: Any) -> list[Remark]:
    """The remarks of fusion passes on an edited graph, which no longer has the declared outputs."""
    dead_code(step.graph)
    found: list[Remark] = []
    for item in passes:
        found.extend(item.apply(step.program, PassContext(CompileConfig())).remarks)
    return found


def missed(remarks: list[Remark], name: str) -> Remark:
    """The one missed remark of a pass."""
    found = [remark for remark in remarks if remark.kind == "missed" and remark.pass_name == name]
    assert len(found) == 1, remarks
    return found[0]


# Lightning Indexer ---------------------------------------------------------------------------------------------------


def relu_of(step: Any) -> Node:
    return nodes(step, ATEN.relu.default)[0]


def sigmoid_for_relu(step: Any) -> Node:
    node = relu_of(step)
    node.target = ATEN.sigmoid.default
    return node


def negative_scale_before(step: Any) -> Node:
    relu = relu_of(step)
    scaled = add(step, relu, ATEN.mul.Tensor, relu.args[0], -0.5)
    relu.args = (scaled,)
    return scaled


def negative_scale_behind(step: Any) -> Node:
    relu = relu_of(step)
    scaled = add(step, relu.next, ATEN.mul.Tensor, relu, -0.5)
    relu.replace_all_uses_with(scaled, delete_user_cb=lambda user: user is not scaled)
    return scaled


def smallest(step: Any) -> Node:
    topk = indexer_topk(step)
    topk.args = (*topk.args[:2], -1, False)
    return topk


def values_used(step: Any) -> Node:
    import operator

    topk = indexer_topk(step)
    values = add(step, topk.next, operator.getitem, topk, 0)
    add_output(step, values)
    return values


def order_used(step: Any) -> Node:
    index = next(iter(indexer_topk(step).users))
    add_output(step, index)
    return step.graph.output_node()


def scores_used_elsewhere(step: Any) -> Node:
    relu = relu_of(step)
    add_output(step, relu)
    return relu


def head_sums_used_elsewhere(step: Any) -> Node:
    product = next(iter(relu_of(step).users))
    add_output(step, product)
    return product


def key_cache_written_between(step: Any) -> Node:
    topk = indexer_topk(step)
    cache = next(n for n in step.graph.nodes if n.op == "placeholder" and n.name.endswith("index_key"))
    return add(step, topk, ATEN.mul_.Tensor, cache, 0.5)


def double_keys(step: Any) -> Node:
    product = relu_of(step).args[0]
    wide = [add(step, product, ATEN._to_copy.default, arg, dtype=torch.float64) for arg in product.args]
    sines = [add(step, product, ATEN.sin.default, node) for node in wide]
    product.args = tuple(sines)
    return sines[0]


def keys_by_channel(step: Any) -> Node:
    """A tensor [B, 1, D, T] that was computed so: no view of it is [B, T, D]."""
    product = relu_of(step).args[0]
    product.args = (product.args[0], add(step, product, ATEN.sin.default, product.args[1]))
    return product.args[1]


def picks_without_mask(step: Any) -> Node:
    both = next(n for n in nodes(step, ATEN.__and__.Tensor) if any(a.target is ATEN.scatter.value for a in n.args))
    picked = next(a for a in both.args if a.target is ATEN.scatter.value)
    both.replace_all_uses_with(picked)
    return next(n for n in nodes(step, ATEN.bitwise_not.default) if n.args[0].all_input_nodes[0] is picked)


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (sigmoid_for_relu, "expected relu, found aten.sigmoid"),
        (negative_scale_before, "a positive factor instead of -0.5"),
        (negative_scale_behind, "a positive factor instead of -0.5"),
        (smallest, "the smallest scores"),
        (values_used, "the values of the top-k are used"),
        (order_used, "the order of the top-k is used by output"),
        (scores_used_elsewhere, "is used elsewhere, by output"),
        (head_sums_used_elsewhere, "is used elsewhere, by output"),
        (key_cache_written_between, "is written between its use and topk"),
        (double_keys, "is float64, wanted bfloat16, float16, float32"),
        (keys_by_channel, "the key cache is not [b, t, d]"),
        (picks_without_mask, "the picks are used without the indexer's mask"),
    ],
)
def test_an_indexer_is_refused(edit: Callable[[Any], Node], reason: str, kimi: Any) -> None:
    fault = edit(kimi)
    before = len(kimi.graph.nodes)
    remark = missed(apply(kimi, FuseLightningIndexer()), "fuse-lightning-indexer")
    assert reason in remark.message
    assert remark.node == fault.name
    assert remark.score >= 1
    assert kimi.fused() == {} and len(kimi.graph.nodes) <= before


def test_keys_turned_where_both_sizes_are_equal_stay_turned(step: MakeStep) -> None:
    """64 positions of 64 channels: shapes alone do not tell keys from their transpose."""
    made = step("kimi_k31", "eager", options={"batch": 1}, index_head_dim=64)
    made.fuse((Canonicalize(),))
    product = relu_of(made).args[0]
    turned = add(made, product, ATEN.transpose.int, product.args[1], -2, -1)
    assert turned.meta["val"].shape == product.args[1].meta["val"].shape
    product.args = (product.args[0], turned)
    given = make_inputs(made.program.inputs, {}, 3)
    wanted = Interpreter(made.program.graph_module).run(*(tensor.clone() for tensor in given))
    apply(made, FuseLightningIndexer())
    [indexer] = nodes(made, OPERATORS["lightning_indexer"].overload)
    assert indexer.args[1].meta["val"].stride()[1:] == (1, 64), "the channels of the cache are its keys"
    found = Interpreter(made.program.graph_module).run(*given)
    assert all(map(torch.equal, found, wanted))


def test_a_refusal_names_the_users_line(kimi: Any) -> None:
    sigmoid_for_relu(kimi)
    remark = missed(apply(kimi, FuseLightningIndexer()), "fuse-lightning-indexer")
    path, _, line = remark.source.rpartition(":")
    assert path.endswith("kimi_k31/indexer.py") and line.isdigit()


def test_expert_routing_is_not_worth_a_remark(step: MakeStep) -> None:
    made = step("kimi_k31", "eager")
    made.fuse((Canonicalize(),))
    remarks = apply(made, FuseLightningIndexer())
    assert [remark.kind for remark in remarks] == ["passed"]
    assert len(nodes(made, ATEN.topk.default)) == 1


# Sparse attention ----------------------------------------------------------------------------------------------------


def softmax_of(step: Any) -> Node:
    return next(n for n in nodes(step, ATEN.softmax.int) if n.meta["val"].dim() == 4 and n.meta["val"].shape[-1] == 64)


def attention_mask(step: Any) -> Node:
    return softmax_of(step).args[0]


def further_condition(step: Any) -> Node:
    fill = attention_mask(step)
    shape = fill.meta["val"].shape
    window = add(step, fill, ATEN.ones.default, [1, 1, 1, shape[-1]], dtype=torch.bool)
    window = add(step, fill, ATEN.bernoulli.p, add(step, fill, ATEN._to_copy.default, window, dtype=torch.float32), 0.5)
    window = add(step, fill, ATEN._to_copy.default, window, dtype=torch.bool)
    fill.args = (fill.args[0], add(step, fill, ATEN.__or__.Tensor, fill.args[1], window), fill.args[2])
    return window


def unselected(step: Any, change: Callable[[Node, Node], Node]) -> Node:
    """Mask the attention by ``change(place, the indexer's mask)`` instead of the picks."""
    fill = attention_mask(step)
    shown = change(fill, nodes(step, ATEN.le.Tensor)[0])
    hidden = add(step, fill, ATEN.bitwise_not.default, add(step, fill, ATEN.unsqueeze.default, shown, 1))
    fill.args = (fill.args[0], hidden, fill.args[2])
    return shown


def two_masks_and_no_selection(step: Any) -> Node:
    def both(fill: Node, visible: Node) -> Node:
        positions = visible.args[0]
        return add(step, fill, ATEN.__and__.Tensor, visible, add(step, fill, ATEN.ge.Scalar, positions, 3))

    return unselected(step, both).args[1]


def pairs_of_keys_and_no_selection(step: Any) -> Node:
    def doubled(fill: Node, visible: Node) -> Node:
        positions, limit = visible.args
        return add(step, fill, ATEN.le.Tensor, add(step, fill, ATEN.mul.Tensor, positions, 2), limit)

    return unselected(step, doubled)


def test_an_attention_over_all_keys_is_fused_for_few_queries(kimi: Any) -> None:
    unselected(kimi, lambda fill, visible: visible)
    remarks = apply(kimi, FuseSparseAttention())
    assert [remark.kind for remark in remarks] == ["passed"] and kimi.fused() == {"latent_attention": 1}
    lengths = kimi.operator("latent_attention").args[4]
    assert lengths.target is ATEN.add.Tensor and lengths.args[1] == 1


def mask_per_head(step: Any) -> Node:
    fill = attention_mask(step)
    mask = fill.args[1]
    wide = add(step, fill, ATEN.expand.default, mask, [2, 4, 1, 64])
    fill.args = (fill.args[0], add(step, fill, ATEN.clone.default, wide), fill.args[2])
    return fill.args[1]


def weights_used_elsewhere(step: Any) -> Node:
    node = softmax_of(step)
    add_output(step, node)
    return node


def latent_written_between(step: Any) -> Node:
    cache = next(n for n in step.graph.nodes if n.op == "placeholder" and n.name.endswith("latent"))
    return add(step, softmax_of(step), ATEN.mul_.Tensor, cache, 0.5)


def values_of_another_weight(step: Any) -> Node:
    sink = softmax_of(step)
    product = next(user for user in sink.users)
    while product.target is not ATEN.matmul.default:
        product = next(iter(product.users))
    sine = add(step, product, ATEN.sin.default, product.args[1])
    product.args = (product.args[0], sine)
    return sine


def shared_rows(step: Any) -> Node:
    """Values that are the rows of the keys."""
    product = next(n for n in nodes(step, ATEN.matmul.default) if softmax_of(step) in _ancestors(n))
    other = next(
        n for n in step.graph.nodes if n.target is product.args[1].target and n.args[0] is product.args[1].args[0]
    )
    product.args = (product.args[0], other)
    return other


def _ancestors(node: Node, depth: int = 4) -> set[Node]:
    if not depth:
        return {node}
    return {node}.union(*(_ancestors(source, depth - 1) for source in node.all_input_nodes))


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (further_condition, "the attention has a mask that the indexer has not"),
        (two_masks_and_no_selection, "attention over all keys has masks besides a length"),
        (pairs_of_keys_and_no_selection, "the smaller side of the mask is not a key position"),
        (mask_per_head, "the mask differs from head to head"),
        (weights_used_elsewhere, "used 2 times"),
        (latent_written_between, "is written between its use and matmul"),
        (values_of_another_weight, "the values are no bias-free linear of a latent"),
        (shared_rows, "keys and values share rows of the weight"),
    ],
)
def test_an_attention_is_refused(edit: Callable[[Any], Node], reason: str, kimi: Any) -> None:
    apply(kimi, FuseLightningIndexer())
    fault = edit(kimi)
    remark = missed(apply(kimi, FuseSparseAttention()), "fuse-sparse-attention")
    assert reason in remark.message
    assert remark.node == fault.name
    assert "sparse_attention" not in kimi.fused()


def test_an_attention_over_unfused_picks_is_refused(kimi: Any) -> None:
    remark = missed(apply(kimi, FuseSparseAttention()), "fuse-sparse-attention")
    assert "not that of an indexer that was fused" in remark.message


def test_an_indexer_alone_keeps_the_numbers(step: MakeStep) -> None:
    """-1 meets the scatter of an attention that stays; rows see fewer keys than are picked."""
    made = step("kimi_k31", "eager", start=0)
    made.fuse((Canonicalize(), FuseLightningIndexer()))
    assert made.fused() == {"lightning_indexer": 1}
    assert made.error() < 1e-5


def test_a_longer_length_in_the_attention_is_refused(kimi: Any) -> None:
    apply(kimi, FuseLightningIndexer())
    visible = nodes(kimi, ATEN.le.Tensor)[0]
    later = add(kimi, visible, ATEN.add.Tensor, visible.args[1], 1)
    visible.args = (visible.args[0], later)
    remark = missed(apply(kimi, FuseSparseAttention()), "fuse-sparse-attention")
    assert "is another length than the indexer's" in remark.message


# KDA -----------------------------------------------------------------------------------------------------------------


def state_write(step: Any) -> Node:
    return next(n for n in nodes(step, ATEN.copy_.default) if n.meta["val"].dim() == 4)


def queries_and_keys_swapped(step: Any) -> None:
    parts = [
        n
        for n in step.graph.nodes
        if str(n.target).startswith("<built-in function getitem")
        and n.args[0].target in (ATEN.split.Tensor, ATEN.split_with_sizes.default, ATEN.chunk.default)
    ]
    silu = next(n for n in nodes(step, ATEN.silu.default) if n.args[0].meta["val"].shape[1] == 192)
    parts = [n for n in parts if silu in _ancestors(n, 4)]
    first, second = parts[:2]
    users = list(first.users), list(second.users)
    for user in users[0]:
        user.replace_input_with(first, second)
    for user in users[1]:
        user.replace_input_with(second, first)


def state_used_elsewhere(step: Any) -> None:
    state = state_write(step).args[0]
    add_output(step, add(step, state_write(step), ATEN.sin.default, state))


def cached_inputs_used_elsewhere(step: Any) -> None:
    state = next(n for n in step.graph.nodes if n.op == "placeholder" and n.name.endswith("conv"))
    add_output(step, add(step, state_write(step), ATEN.sin.default, state))


def new_state_used_elsewhere(step: Any) -> None:
    add_output(step, add(step, state_write(step), ATEN.sin.default, state_write(step).args[1]))


def other_activation(step: Any) -> None:
    next(n for n in nodes(step, ATEN.silu.default) if n.meta["val"].shape[1] == 192).target = ATEN.tanh.default


def other_state_written(step: Any) -> None:
    write = state_write(step)
    write.args = (write.args[0], add(step, write, ATEN.sin.default, write.args[1]))


def older_inputs_kept(step: Any) -> None:
    """The cached inputs become the oldest ones instead of the newest."""
    write = next(n for n in nodes(step, ATEN.copy_.default) if n.meta["val"].dim() == 3)
    window = write.args[1].args[0]
    write.args = (write.args[0], add(step, write, ATEN.slice.Tensor, window, 2, 0, 3))


def output_gate_written(step: Any) -> None:
    """The logits of the output gate change between their sigmoid and the product with the norm."""
    gate = next(n for n in reversed(nodes(step, ATEN.sigmoid.default)) if n.meta["val"].shape == (2, 1, 4, 16))
    add(step, gate.next, ATEN.zero_.default, gate.args[0])


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (output_gate_written, "the output gate"),
        (queries_and_keys_swapped, "has layout"),
        (state_used_elsewhere, "is used elsewhere, by sin"),
        (cached_inputs_used_elsewhere, "is used elsewhere, by sin"),
        (new_state_used_elsewhere, "is used elsewhere, by sin"),
        (other_activation, "not from SiLU of a convolution"),
        (older_inputs_kept, "the cached inputs are not replaced by the newest ones"),
    ],
)
def test_a_kda_step_is_refused(edit: Callable[[Any], None], reason: str, kimi: Any) -> None:
    edit(kimi)
    remark = missed(apply(kimi, RaiseKda()), "raise-kda")
    assert reason in remark.message, remark
    assert kimi.fused() == {}


def test_another_recurrence_is_no_near_miss(kimi: Any) -> None:
    other_state_written(kimi)
    assert apply(kimi, RaiseKda()) == [] and kimi.fused() == {}


def test_a_norm_that_does_not_fit_stays_behind(kimi: Any) -> None:
    norm = next(n for n in nodes(kimi, ATEN.rsqrt.default) if n.meta["val"].shape == (2, 1, 4, 1))
    norm.target = ATEN.sqrt.default
    remarks = apply(kimi, RaiseKda())
    assert [remark.kind for remark in remarks] == ["passed"]
    node = kimi.operator("kda_decode")
    assert node.args[8] is None and node.args[9] is None


# Wrong rewrites must show -------------------------------------------------------------------------------------------


def fewer_picks(step: Any) -> None:
    node = step.operator("lightning_indexer")
    node.kwargs = {**node.kwargs, "k": node.kwargs["k"] - 1}


def one_key_more(step: Any) -> None:
    lengths = step.operator("lightning_indexer").args[3]
    lengths.args = (lengths.args[0], lengths.args[1] + 1)


def larger_scale(step: Any) -> None:
    node = step.operator("sparse_attention")
    node.kwargs = {**node.kwargs, "scale": node.kwargs["scale"] * 1.1}


def weights_swapped(step: Any) -> None:
    first, second = [n for n in nodes(step, ATEN.slice.Tensor) if n.args[0].meta["val"].dim() == 3 and n.args[1] == 1][
        -2:
    ]
    first.args, second.args = second.args, first.args


def larger_kda_scale(step: Any) -> None:
    node = step.operator("kda_decode")
    node.kwargs = {**node.kwargs, "scale": node.kwargs["scale"] * 1.1, "norm_eps": 0.1}


def other_state_layout(step: Any) -> None:
    node = step.operator("kda_decode")
    node.kwargs = {**node.kwargs, "state_layout": "kv"}


def no_bound(step: Any) -> None:
    node = step.operator("kda_decode")
    node.kwargs = {**node.kwargs, "lower_bound": None}


@pytest.mark.parametrize(
    "edit", [fewer_picks, one_key_more, larger_scale, weights_swapped, larger_kda_scale, other_state_layout, no_bound]
)
def test_the_comparison_sees_a_wrong_rewrite(edit: Callable[[Any], None], step: MakeStep) -> None:
    made = step("kimi_k31", "eager")
    made.fuse()
    edit(made)
    assert made.error(steps=3) > 1e-3
