"""``fuse-sparse-attention``: latent expansion, picks as a mask and softmax over all keys become ``sparse_attention``.

Anchored at the attention itself (``scaled_dot_product_attention`` or ``softmax``); evidence: keys and values are one
linear of a cached latent, and the mask is an indexer's picks. The linear's weight is absorbed into query and output.
The same without picks, for few queries, becomes ``latent_attention``.
"""

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.fx import Graph, Node

from kimigraph.ir.operators import OPERATORS
from kimigraph.ir.program import CapturedProgram
from kimigraph.passes.algebra.attention import Attention, attention_at, is_sink
from kimigraph.passes.algebra.frames import Operand
from kimigraph.passes.algebra.latent import LatentExpansion, expansion_of
from kimigraph.passes.algebra.lengths import Length, length_operand
from kimigraph.passes.algebra.masks import selects
from kimigraph.passes.algebra.nodes import dtype
from kimigraph.passes.algebra.pieces import Piece, pieces
from kimigraph.passes.algebra.refusal import Refused
from kimigraph.passes.algebra.rewrite import build, call, replace
from kimigraph.passes.algebra.rule import FusionPass, descriptor_of, require_unused_elsewhere, require_unwritten
from kimigraph.passes.algebra.selection import selection_of, visible_length

ATEN = torch.ops.aten


@dataclass(frozen=True)
class AttentionSite:
    """A checked attention: its operands, the indices that select its keys, or without any the length that it sees."""

    attention: Attention
    expansion: LatentExpansion
    picks: Node | None
    length: Length | None
    descriptor: str


@dataclass(frozen=True)
class FuseSparseAttention(FusionPass):
    """Replaces multi-head latent attention over an indexer's picks by the absorbed form, which reads picked rows only.

    Without picks the absorbed form reads all rows that a length shows; it is taken where it computes less than
    expanding the cache. Refused: a mask besides the indexer's or the length, keys and values that are not one linear of
    a latent, weights used elsewhere, a cache written before the attention's own place.
    """

    name: ClassVar[str] = "fuse-sparse-attention"
    summary: ClassVar[str] = "latent attention over an indexer's picks, or over all keys, becomes one operator"
    fusion: ClassVar[bool] = True
    pattern: ClassVar[str] = (
        "a `softmax` or `scaled_dot_product_attention` whose keys and values are one linear of a latent cache, and "
        "whose mask is a set of picks or a causal length"
    )
    constraints: ClassVar[tuple[str, ...]] = (
        "the mask hides what was not picked, and else exactly what the indexer's mask hides",
        "without picks one length, and fewer operations than expanding the cache takes",
        "one mask for all heads",
        "the attention weights are used nowhere else",
        "the caches are not written between the attention's reads and its place",
        "weight and latent cache of one type",
    )
    effect: ClassVar[str] = (
        "`sparse_attention` over the picked rows or `latent_attention` over all, the linear absorbed into query and "
        "output"
    )

    def anchors(self, graph: Graph) -> Sequence[Node]:
        """All softmaxes and fused attentions."""
        return [node for node in graph.nodes if is_sink(node)]

    def check(self, program: CapturedProgram, anchor: Node) -> AttentionSite:
        """The sparse latent attention around this sink."""
        attention = attention_at(anchor)
        selected = selects(attention.masks)
        try:
            expansion = expansion_of(attention)
        except Refused as refusal:
            raise refusal.raised_to(1 if selected else 0, attention.path) from refusal
        evidence = (*attention.path, expansion.latent.node, expansion.weight)
        try:
            return _checked(program, attention, expansion)
        except Refused as refusal:
            raise refusal.raised_to(3 if selected else 2, evidence) from refusal

    def note(self, site: AttentionSite) -> str:
        """What cannot be proved of a list that is no indexer's own."""
        if site.picks is None or site.picks.target is OPERATORS["lightning_indexer"].overload:
            return ""
        return f"{site.picks.name} is taken to name no key twice, which the graph cannot prove"

    def rewrite(self, program: CapturedProgram, site: AttentionSite) -> Node:
        """Put the operator, with the absorbed weight around it, in the place of the attention."""
        graph, attention, expansion = program.graph_module.graph, site.attention, site.expansion
        here = _Emitter(graph, attention.out)
        weight = here(
            ATEN.view.default, expansion.weight, [expansion.heads, expansion.per_head, expansion.latent_width]
        )
        up_k = here(ATEN.slice.Tensor, weight, 1, expansion.key_row, expansion.key_row + expansion.nope.width)
        up_v = here(ATEN.slice.Tensor, weight, 1, expansion.value_row, expansion.value_row + expansion.value_width)
        q_latent = _absorb_query(here, _columns(here, attention.q, expansion.nope), up_k, expansion)
        q_rope, rope = None, None
        if expansion.rope is not None and expansion.rope_cache is not None:
            q_rope = here(ATEN.transpose.int, _columns(here, attention.q, expansion.rope), 1, 2)
            rope = build(graph, expansion.rope_cache, attention.out)
        latent = build(graph, expansion.latent, attention.out)
        name, chosen = "latent_attention", None
        if site.picks is not None:
            name, chosen = "sparse_attention", _as_int32(graph, site.picks, attention.out)
        elif site.length is not None:
            chosen = length_operand(graph, site.length, expansion.batch, attention.out)
        node = call(
            graph,
            OPERATORS[name].overload,
            (q_latent, q_rope, latent, rope, chosen),
            {"scale": attention.scale, "descriptor": site.descriptor},
            like=attention.sink,
            before=attention.out,
            replaces=[step for step in attention.path if step.target in _NAMED],
        )
        out = _absorb_output(here, here(operator.getitem, node, 0), up_v, expansion)
        replace(attention.out, out)
        return node


_NAMED = frozenset(
    (ATEN.matmul.default, ATEN.softmax.int, ATEN._softmax.default, ATEN.scaled_dot_product_attention.default)
)


def _as_int32(graph: Graph, picks: Node, before: Node) -> Node:
    if dtype(picks) is torch.int32:
        return picks
    return call(graph, ATEN._to_copy.default, (picks,), {"dtype": torch.int32}, like=picks, before=before)


@dataclass(frozen=True)
class _Emitter:
    """Makes nodes before a place, with that place's origin."""

    graph: Graph
    place: Node

    def __call__(self, target: Any, *args: Any) -> Node:
        return call(self.graph, target, args, like=self.place, before=self.place)


def _checked(program: CapturedProgram, attention: Attention, expansion: LatentExpansion) -> AttentionSite:
    graph = program.graph_module.graph
    want = (expansion.batch, expansion.tokens, expansion.keys)
    picks = selection_of(graph, attention.sink, attention.masks, want)
    length = None
    if picks is None:
        _require_cheaper(attention, expansion)
        length = visible_length(attention.masks, want)
    if attention.scale <= 0:
        raise Refused("the scale is not positive", attention.sink)
    require_unused_elsewhere(attention.path[:-1], [attention.out])
    for what, found in (("the latent cache", expansion.latent), ("the rope cache", expansion.rope_cache)):
        if found is not None:
            require_unwritten(graph, what, found, attention.out)
    reader = min(attention.path)
    require_unwritten(graph, "the query", Operand(attention.q, (), reader), attention.out)
    for piece in pieces(attention.q):
        require_unwritten(graph, "the query", Operand(piece.node, (), piece.reader or reader), attention.out)
    descriptor = descriptor_of(program, expansion.latent.node)
    rope = expansion.rope_cache
    if rope is not None and descriptor_of(program, rope.node) != descriptor:
        raise Refused(f"latent and rope cache are described differently: {descriptor or 'not at all'}", rope.node)
    return AttentionSite(attention, expansion, picks, length, descriptor)


def _require_cheaper(attention: Attention, expansion: LatentExpansion) -> None:
    """Refuse where the absorbed form, wider for each query, multiplies more than expanding each key once would."""
    own = expansion.nope.width + expansion.value_width
    if expansion.tokens * (2 * expansion.latent_width - own) > expansion.latent_width * own:
        raise Refused(f"{expansion.tokens} queries make absorbed attention over all keys dearer", attention.sink)


def _columns(here: _Emitter, q: Node, wanted: Piece) -> Node:
    """The query's columns that meet a part of the keys: a part of its own concatenation, or a slice."""
    for piece in pieces(q):
        if (piece.start, piece.stop) == (wanted.start, wanted.stop):
            return piece.node
    return here(ATEN.slice.Tensor, q, 3, wanted.start, wanted.stop)


def _absorb_query(here: _Emitter, q_nope: Node, up_k: Node, expansion: LatentExpansion) -> Node:
    """q_nope [B, H, S, dn] times the key rows [H, dn, L]: one product a head for all tokens, as [B, S, H, L]."""
    rows = expansion.batch * expansion.tokens
    heads_first = here(ATEN.permute.default, q_nope, [1, 0, 2, 3])
    flat = here(ATEN.reshape.default, heads_first, [expansion.heads, rows, expansion.nope.width])
    product = here(ATEN.bmm.default, flat, up_k)
    by_row = here(ATEN.transpose.int, product, 0, 1)
    sizes = [expansion.batch, expansion.tokens, expansion.heads, expansion.latent_width]
    return here(ATEN.view.default, by_row, sizes)


def _absorb_output(here: _Emitter, out: Node, up_v: Node, expansion: LatentExpansion) -> Node:
    """The attention's latent output [B, S, H, L] times the value rows [H, dv, L], as [B, H, S, dv]."""
    rows = expansion.batch * expansion.tokens
    flat = here(ATEN.view.default, out, [rows, expansion.heads, expansion.latent_width])
    heads_first = here(ATEN.transpose.int, flat, 0, 1)
    product = here(ATEN.bmm.default, heads_first, here(ATEN.transpose.int, up_v, 1, 2))
    sizes = [expansion.heads, expansion.batch, expansion.tokens, expansion.value_width]
    return here(ATEN.permute.default, here(ATEN.view.default, product, sizes), [1, 0, 2, 3])
