"""Sizes, names and spellings that must not matter: counts stay, and so do the numbers."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx import Node

from kimigraph.ir.fake import infer
from kimigraph.ir.purity import dead_code
from kimigraph.passes.canonicalize import Canonicalize
from kimigraph.passes.cleanup.asserts import drop_metadata_asserts
from kimigraph.passes.fuse_lightning_indexer import FuseLightningIndexer
from kimigraph.passes.fuse_sparse_attention import FuseSparseAttention
from kimigraph.passes.raise_kda import RaiseKda

ATEN = torch.ops.aten
MakeStep = Callable[..., Any]

COUNTS = {
    "deepseek_v32": {"lightning_indexer": 2, "sparse_attention": 2},
    "glm5_next": {"lightning_indexer": 1, "sparse_attention": 1, "kda_decode": 1},
    "kimi_k31": {"lightning_indexer": 1, "sparse_attention": 1, "kda_decode": 1},
}
SEVERAL_TOKENS = {"lightning_indexer": 1, "sparse_attention": 1}
"""Several tokens take the chunk form of KDA, which has no decode operator."""

KIMI_DISTINCT: dict[str, Any] = {
    "kv_lora_rank": 40,
    "qk_nope_head_dim": 20,
    "v_head_dim": 24,
    "index_head_dim": 48,
    "num_attention_heads": 3,
}
DISTINCT = {**KIMI_DISTINCT, "num_key_value_heads": 3}


@pytest.mark.parametrize("model", COUNTS)
def test_fewer_visible_keys_than_picks(model: str, step: MakeStep) -> None:
    fused = step(model, "eager", start=0)
    fused.fuse()
    assert fused.fused() == COUNTS[model]
    assert fused.error() < 1e-5


@pytest.mark.parametrize(
    ("model", "attention", "fields", "options", "counts"),
    [
        # one sequence of several tokens, all widths different
        (
            "deepseek_v32",
            "sdpa",
            DISTINCT,
            {"batch": 1, "tokens": 3},
            COUNTS["deepseek_v32"],
        ),
        ("kimi_k31", "eager", KIMI_DISTINCT, {"tokens": 3}, SEVERAL_TOKENS),
        # one head, index keys as wide as the cache is long, all keys picked
        (
            "deepseek_v32",
            "eager",
            {"num_attention_heads": 1, "num_key_value_heads": 1, "index_head_dim": 64, "index_topk": 64},
            {},
            COUNTS["deepseek_v32"],
        ),
        (
            "kimi_k31",
            "eager",
            {"num_attention_heads": 1, "index_head_dim": 64, "kv_lora_rank": 64, "index_topk": 64},
            {"batch": 1},
            COUNTS["kimi_k31"],
        ),
        (
            "glm5_next",
            "eager",
            {"num_attention_heads": 1, "num_key_value_heads": 1, "linear_num_heads": 1, "index_topk": 64},
            {"batch": 1},
            COUNTS["glm5_next"],
        ),
    ],
)
def test_sizes_do_not_matter(
    model: str, attention: str, fields: dict[str, Any], options: dict[str, Any], counts: dict[str, int], step: MakeStep
) -> None:
    fused = step(model, attention, options=options, **fields)
    fused.fuse()
    assert fused.fused() == counts
    assert fused.error(steps=4) < 1e-5


@pytest.mark.parametrize("model", COUNTS)
def test_bfloat16_fuses_alike(model: str, step: MakeStep) -> None:
    fused = step(model, "eager", options={"dtype": "bfloat16"})
    fused.fuse()
    assert fused.fused() == COUNTS[model]
    if model != "kimi_k31":
        return
    picks, attention, kda = (fused.operator(name) for name in ("lightning_indexer", "sparse_attention", "kda_decode"))
    assert picks.args[0].meta["val"].dtype is torch.bfloat16 and picks.args[1].meta["val"].dtype is torch.bfloat16
    assert attention.args[2].meta["val"].dtype is torch.bfloat16
    assert kda.meta["val"].dtype is torch.bfloat16
    assert fused.error() < 0.03


@pytest.mark.parametrize("model", ["deepseek_v32", "kimi_k31"])
def test_equal_nodes_need_not_be_merged(model: str, step: MakeStep) -> None:
    """Without common subexpression elimination each layer has its own mask and its own positions."""
    fused = step(model, "eager")
    drop_metadata_asserts(fused.graph)
    dead_code(fused.graph)
    fused.fuse((RaiseKda(), FuseLightningIndexer(), FuseSparseAttention()))
    assert fused.fused() == COUNTS[model]
    assert fused.error(steps=3) < 1e-5


def test_the_chunk_form_of_kda_is_left_with_a_remark(step: MakeStep) -> None:
    made = step("kimi_k31", "eager", options={"tokens": 3}, **KIMI_DISTINCT)
    (remark,) = [item for item in made.fuse() if item.kind == "missed"]
    assert remark.pass_name == "raise-kda" and "the new state" in remark.message


def rename(step: Any) -> None:
    """Names that say nothing, and no trace of modules."""
    specs = []
    for index, node in enumerate(step.graph.nodes):
        node.meta.pop("nn_module_stack", None)
        node.meta.pop("stack_trace", None)
        if node.op != "output":
            node._rename(f"x{index}")
        if node.op == "placeholder":
            node.target = node.name
            old = step.program.inputs[len(specs)]
            specs.append(type(old)(**{**vars(old), "name": node.name}))
            if old.name in step.program.tensors:
                step.program.tensors[node.name] = step.program.tensors[old.name]
    step.program.inputs = tuple(specs)


def commute(step: Any) -> None:
    """Swap the operands of every commutative operation of two tensors."""
    for node in step.graph.nodes:
        if node.target in (ATEN.add.Tensor, ATEN.mul.Tensor, ATEN.__and__.Tensor) and isinstance(node.args[1], Node):
            node.args = (node.args[1], node.args[0])


@pytest.mark.parametrize("model", COUNTS)
def test_names_and_operand_order_do_not_matter(model: str, step: MakeStep) -> None:
    fused = step(model, "eager")
    rename(fused)
    commute(fused)
    fused.fuse()
    assert fused.fused() == COUNTS[model]
    assert fused.error(steps=3) < 1e-5


def canonical(step: Any) -> Any:
    step.fuse((Canonicalize(),))
    return step


def insert(step: Any, target: Any, *args: Any, before: Node) -> Node:
    with step.graph.inserting_before(before):
        node = step.graph.call_function(target, args)
    infer(node)
    return node


def finish(step: Any) -> None:
    step.fuse((FuseLightningIndexer(), FuseSparseAttention()))


def product_as_sum(step: Any) -> None:
    for relu in [node for node in step.graph.nodes if node.target is ATEN.relu.default]:
        product = next(user for user in relu.users if user.target is ATEN.matmul.default)
        column = insert(step, ATEN.transpose.int, product.args[0], -1, -2, before=product)
        weighted = insert(step, ATEN.mul.Tensor, relu, column, before=product)
        product.replace_all_uses_with(insert(step, ATEN.sum.dim_IntList, weighted, [-2], True, before=product))


def scale_behind_relu(step: Any) -> None:
    for relu in [node for node in step.graph.nodes if node.target is ATEN.relu.default]:
        factor = relu.args[0]
        relu.args = (factor.args[0],)
        moved = insert(step, ATEN.mul.Tensor, relu, factor.args[1], before=relu.next)
        relu.replace_all_uses_with(moved, delete_user_cb=lambda user, moved=moved: user is not moved)


def strict_comparison(step: Any) -> None:
    for node in [node for node in step.graph.nodes if node.target is ATEN.le.Tensor]:
        later = insert(step, ATEN.add.Tensor, node.args[1], 1, before=node)
        node.target, node.args = ATEN.lt.Tensor, (node.args[0], later)


def turned_comparison(step: Any) -> None:
    for node in [node for node in step.graph.nodes if node.target is ATEN.le.Tensor]:
        node.target, node.args = ATEN.ge.Tensor, (node.args[1], node.args[0])


def relu_as_clamp(step: Any) -> None:
    for node in [node for node in step.graph.nodes if node.target is ATEN.relu.default]:
        node.target, node.args = ATEN.clamp_min.default, (node.args[0], 0)


@pytest.mark.parametrize(
    "edit", [product_as_sum, scale_behind_relu, strict_comparison, turned_comparison, relu_as_clamp]
)
def test_other_spellings_fuse_alike(edit: Callable[[Any], None], step: MakeStep) -> None:
    fused = canonical(step("deepseek_v32", "eager"))
    edit(fused)
    dead_code(fused.graph)
    finish(fused)
    assert fused.fused() == COUNTS["deepseek_v32"]
    assert fused.operator("lightning_indexer").args[3] is not None, "the mask must still be a length"
    assert fused.error(steps=3) < 1e-5


def test_a_mask_that_is_no_length_stays_an_operand(step: MakeStep) -> None:
    """Even keys alone are visible: to the indexer as a mask, and to the attention through the picks."""
    fused = canonical(step("kimi_k31", "eager"))
    causal = next(node for node in fused.graph.nodes if node.target is ATEN.le.Tensor)
    numbers = next(node for node in fused.graph.nodes if node.target is ATEN.arange.default and node.args[0] == 64)
    odd = insert(fused, ATEN.remainder.Scalar, numbers, 2, before=causal.next)
    even = insert(fused, ATEN.eq.Scalar, odd, 0, before=odd.next)
    both = insert(fused, ATEN.__and__.Tensor, causal, even, before=even.next)
    causal.replace_all_uses_with(both, delete_user_cb=lambda user: user is not both)
    before = fused.program.copy()
    finish(fused)
    assert fused.fused() == {"lightning_indexer": 1, "sparse_attention": 1}
    picks = fused.operator("lightning_indexer")
    assert picks.args[3] is None and picks.args[4] is not None
    fused.source = Graphed(before, fused.source)
    assert fused.error(steps=3) < 1e-5


class Graphed:
    """A captured graph in the place of the eager model."""

    def __init__(self, program: Any, source: Any) -> None:
        self.program, self.source = program, source

    def build(self, length: int) -> Any:
        _, args, kwargs = self.source.build(length)
        return self.run, args, kwargs

    def run(self, ids: torch.Tensor, *rest: Any) -> torch.Tensor:
        given = {"input_ids": ids, "lengths": rest[0], **rest[-1]}
        specs = self.program.inputs
        return self.program.graph_module(
            *(self.program.tensors[s.name] if s.bound else given[s.source] for s in specs)
        )[0]
