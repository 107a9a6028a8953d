"""Picks whose order, rows or columns matter: what a set per query cannot say must not be fused, and numbers stay."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kimigraph.capture import capture_module
from kimigraph.ir.config import CompileConfig
from kimigraph.ir.operators import OPERATORS
from kimigraph.ir.verifier import verify
from kimigraph.passes.base import PassContext
from kimigraph.passes.canonicalize import Canonicalize
from kimigraph.passes.fuse_lightning_indexer import FuseLightningIndexer
from kimigraph.passes.fuse_sparse_attention import FuseSparseAttention

BATCH, TOKENS, KEYS, INDEX_HEADS, INDEX_DIM, PICKS = 2, 2, 32, 32, 16, 8
HEADS, NOPE, ROPE, VALUE, LATENT = 4, 16, 8, 16, 24
PASSES = (Canonicalize(), FuseLightningIndexer(), FuseSparseAttention())


class Attention(nn.Module):
    """An indexer and the latent attention over its picks; subclasses do one thing otherwise."""

    causal = True

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.expand = nn.Linear(LATENT, HEADS * (NOPE + VALUE), bias=False)
        self.by_rank = nn.Parameter(torch.linspace(0, 3, PICKS))

    def forward(self, q: Tensor, w: Tensor, keys: Tensor, qa: Tensor, latent: Tensor, rope: Tensor, n: Tensor) -> Any:
        visible = torch.arange(KEYS)[None, None] <= n[:, None, None] + torch.arange(TOKENS)[None, :, None]
        dots = torch.relu(torch.matmul(q, keys.transpose(-1, -2).unsqueeze(1)))
        scores = (dots * w[..., None]).sum(2)
        if self.causal:
            scores = scores.masked_fill(~visible, float("-inf"))
        scores = self.scores(scores)
        index = self.index(scores.topk(PICKS, -1)[1])
        picked = self.picked(index)
        keep = picked & visible if self.causal else picked
        cols = self.expand(latent).view(BATCH, KEYS, HEADS, NOPE + VALUE).transpose(1, 2)
        nope, values = cols.split([NOPE, VALUE], -1)
        k = torch.cat([nope, rope[:, None].expand(BATCH, HEADS, KEYS, ROPE)], -1)
        self.between(rope)
        logits = (qa @ k.transpose(-1, -2) * 0.2).masked_fill(~keep[:, None], float("-inf"))
        return self.weights(logits.softmax(-1)) @ values, self.further(index)

    def scores(self, scores: Tensor) -> Tensor:
        return scores

    def index(self, index: Tensor) -> Tensor:
        return index

    def picked(self, index: Tensor) -> Tensor:
        return torch.zeros(BATCH, TOKENS, KEYS, dtype=torch.bool).scatter(-1, index, True)

    def between(self, rope: Tensor) -> None:
        del rope

    def weights(self, weights: Tensor) -> Tensor:
        return weights

    def further(self, index: Tensor) -> Tensor:
        return torch.zeros(1)


class EightBitScores(Attention):
    """Rounding to 8 bits makes ties, and another pick."""

    def scores(self, scores: Tensor) -> Tensor:
        return scores.to(torch.float8_e5m2).float()


class FirstPicks(Attention):
    def index(self, index: Tensor) -> Tensor:
        return index[..., :4]


class PicksOfAnotherSequence(Attention):
    def index(self, index: Tensor) -> Tensor:
        return index[:1].expand(BATCH, TOKENS, PICKS)


class WeightByRank(Attention):
    causal = False

    def further(self, index: Tensor) -> Tensor:
        return torch.zeros(BATCH, TOKENS, KEYS).scatter(-1, index, self.by_rank.expand(BATCH, TOKENS, PICKS))


class OneRowAPick(Attention):
    causal = False

    def further(self, index: Tensor) -> Tensor:
        return torch.zeros(BATCH, TOKENS, PICKS, KEYS).scatter(-1, index.unsqueeze(-1), 1.0)


class CountByRank(Attention):
    causal = False

    def further(self, index: Tensor) -> Tensor:
        pages = torch.arange(KEYS).flip(0).expand(BATCH, TOKENS, KEYS).gather(-1, index)
        return torch.zeros(BATCH, TOKENS, KEYS).scatter_add(-1, pages, self.by_rank.expand(BATCH, TOKENS, PICKS))


class TableByRank(Attention):
    causal = False

    def further(self, index: Tensor) -> Tensor:
        table = (torch.arange(PICKS)[:, None] * 3 + torch.arange(KEYS)) % KEYS
        pages = table[torch.arange(PICKS), index]
        return torch.zeros(BATCH, TOKENS, KEYS).scatter_add(-1, pages, torch.ones(BATCH, TOKENS, PICKS))


class MaskOfAnotherSequence(Attention):
    def picked(self, index: Tensor) -> Tensor:
        return super().picked(index)[:1].expand(BATCH, TOKENS, KEYS)


class MaskOfAnotherToken(Attention):
    def picked(self, index: Tensor) -> Tensor:
        return super().picked(index)[:, :1].expand(BATCH, TOKENS, KEYS)


class SequencesForTokens(Attention):
    def picked(self, index: Tensor) -> Tensor:
        return super().picked(index).transpose(0, 1)


class KeysMoved(Attention):
    def picked(self, index: Tensor) -> Tensor:
        return torch.zeros(BATCH, TOKENS, KEYS + 2, dtype=torch.bool).scatter(-1, index, True)[..., 2:]


class RopeWritten(Attention):
    def between(self, rope: Tensor) -> None:
        rope.mul_(0.5)


class WeightsTruncated(Attention):
    def weights(self, weights: Tensor) -> Tensor:
        return weights.to(torch.int32).float()


def inputs() -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(1)

    def made(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=generator)

    return (
        made(BATCH, TOKENS, INDEX_HEADS, INDEX_DIM),
        made(BATCH, TOKENS, INDEX_HEADS).abs() + 0.1,
        made(BATCH, KEYS, INDEX_DIM),
        made(BATCH, HEADS, TOKENS, NOPE + ROPE),
        made(BATCH, KEYS, LATENT),
        made(BATCH, KEYS, ROPE),
        torch.tensor([20, 25]),
    )


@pytest.mark.parametrize(
    ("model", "indexer", "attention", "reason"),
    [
        (Attention, 1, 1, ""),
        (EightBitScores, 0, 0, ""),
        (FirstPicks, 0, 0, "the order of the top-k is used by aten.slice"),
        (PicksOfAnotherSequence, 0, 0, "the order of the top-k is used by aten.slice"),
        (WeightByRank, 0, 0, "the order of the top-k is used by aten.scatter"),
        (OneRowAPick, 0, 0, "the order of the top-k is used by aten.scatter"),
        (CountByRank, 0, 0, "the order of the top-k is used by aten.scatter_add"),
        (TableByRank, 0, 0, "the order of the top-k is used by aten.index"),
        (MaskOfAnotherSequence, 1, 0, "the selection meets other queries or keys"),
        (MaskOfAnotherToken, 1, 0, "the selection meets other queries or keys"),
        (SequencesForTokens, 1, 0, "the selection meets other queries or keys"),
        (KeysMoved, 1, 0, "the selection meets other queries or keys"),
        (RopeWritten, 1, 0, "the rope cache rope is written between its use"),
        (WeightsTruncated, 1, 0, "the weights go into _to_copy"),
    ],
)
def test_only_sets_in_their_place_are_fused(model: type[Attention], indexer: int, attention: int, reason: str) -> None:
    module, given = model().eval(), inputs()
    with torch.no_grad():
        expected_caches = [tensor.clone() for tensor in given]
        expected = module(*expected_caches)
    program = capture_module(module, tuple(tensor.clone() for tensor in given), {}, CompileConfig())
    remarks = []
    for item in PASSES:
        remarks += item.apply(program, PassContext(CompileConfig())).remarks
        verify(program)
    counts = [
        sum(node.target is OPERATORS[name].overload for node in program.graph_module.graph.nodes)
        for name in ("lightning_indexer", "sparse_attention")
    ]
    assert counts == [indexer, attention]
    assert not reason or any(reason in remark.message for remark in remarks if remark.kind == "missed")
    program.graph_module.recompile()
    caches = [tensor.clone() for tensor in given]
    callers = [spec for spec in program.inputs if not spec.bound]
    own = {spec.source: tensor for spec, tensor in zip(callers, caches, strict=True)}
    with torch.no_grad():
        found = program.graph_module(
            *(program.tensors[spec.name] if spec.bound else own[spec.source] for spec in program.inputs)
        )
    for one, other in zip([*found[:2], *caches], [*expected, *expected_caches], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
