"""Which sites of the public models fuse, that the old operators are gone, and that the numbers stay."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

ATEN = torch.ops.aten
MakeStep = Callable[..., Any]

ATTENTIONS = (ATEN.scaled_dot_product_attention.default, ATEN.scatter_add.default, ATEN.conv1d.default)
COUNTS = {
    "deepseek_v32": {"lightning_indexer": 2, "sparse_attention": 2},
    "glm5_next": {"lightning_indexer": 1, "sparse_attention": 1, "kda_decode": 1},
    "kimi_k31": {"lightning_indexer": 1, "sparse_attention": 1, "kda_decode": 1},
}
ROUTING = {"deepseek_v32": (3, 1), "glm5_next": (3, 1), "kimi_k31": (1, 0)}
"""top-k and scatter nodes of the expert routers, which stay."""

CASES = [("deepseek_v32", "sdpa"), ("deepseek_v32", "eager"), ("glm5_next", "sdpa"), ("glm5_next", "eager"), ("kimi_k31", "eager")]


def require_old_anchors_gone(step: Any, model: str) -> None:
    topk, scatter = ROUTING[model]
    assert step.count(ATEN.topk.default) == topk
    assert step.count(ATEN.scatter.value) == scatter
    assert step.count(*ATTENTIONS, ATEN.relu.default, ATEN.slice_scatter.default) == 0
    rank4 = [n for n in step.graph.nodes if n.target is ATEN.softmax.int and n.meta["val"].dim() == 4 and n.meta["val"].shape[-1] == 64]
    assert not rank4


@pytest.mark.parametrize(("model", "attention"), CASES)
def test_every_site_is_fused_and_nothing_else_changes(model: str, attention: str, step: MakeStep) -> None:
    fused = step(model, attention)
    remarks = fused.fuse()
    assert fused.fused() == COUNTS[model]
    require_old_anchors_gone(fused, model)
    assert [r.kind for r in remarks] == ["passed"] * sum(COUNTS[model].values())
    assert fused.error() < 1e-5


@pytest.mark.parametrize("model", COUNTS)
def test_marks_change_nothing_in_decode(model: str, step: MakeStep) -> None:
    fused = step(model, "eager", marks=False)
    fused.fuse()
    assert fused.fused() == COUNTS[model]
    require_old_anchors_gone(fused, model)
