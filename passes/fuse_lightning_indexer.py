"""``fuse-lightning-indexer``: score, ReLU, head weights, mask and top-k become ``lightning_indexer``.

Anchored at ``topk``; evidence on the way up: masks over the scores, a weighted sum over heads, ReLU, a product of
queries and keys. Whether a mask is a length is proved by arithmetic on positions; else it stays an operand.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, cast

import torch
from torch import Tensor
from torch.fx import Graph, Node

from kimigraph.ir.operators import OPERATORS
from kimigraph.ir.program import CapturedProgram
from kimigraph.passes.algebra.frames import Frame, Operand, operand, require_type
from kimigraph.passes.algebra.layout import peel
from kimigraph.passes.algebra.lengths import Length, length_of_mask, length_operand
from kimigraph.passes.algebra.masks import MASKED, Atom, MaskTerm, atoms, mask_step
from kimigraph.passes.algebra.match import Match, Trace
from kimigraph.passes.algebra.nodes import FLOATS, argument, packet, rank, shape
from kimigraph.passes.algebra.picks import Uses, redirect, uses_of
from kimigraph.passes.algebra.refusal import Refused
from kimigraph.passes.algebra.rewrite import build, call
from kimigraph.passes.algebra.rule import FusionPass, descriptor_of, require_unused_elsewhere, require_unwritten
from kimigraph.passes.algebra.unify import Either, Leaf, Literal, Op, Scaled, Sum, scaling

ATEN = torch.ops.aten
PRODUCTS = ("matmul", "bmm", "sum")

_DOTS = Scaled("before", Sum(Op("mul", Leaf("q"), Leaf("keys")), "d"))
_RELU = Either(Op("relu", _DOTS), Op("clamp_min", _DOTS, Literal(0)), Op("clamp", _DOTS, Literal(0)))
SCORE = Scaled("after", Sum(Op("mul", Leaf("weights"), Scaled("between", _RELU)), "h"))
"""A Lightning Indexer's score, read under the axes b, s, t."""

OPERANDS = (("q", "the query", "bshd"), ("keys", "the key cache", "btd"), ("weights", "the head weights", "bsh"))
"""Leaf, name for people, and axes of the operator's tensors."""


@dataclass(frozen=True)
class PlacedMask:
    """A mask over the scores; ``frame`` reads the tensor of the masked score's shape under b, s, t."""

    term: MaskTerm
    frame: Frame

    def place(self, tensor: Tensor) -> Tensor:
        """A tensor of the mask's shape as [B, S, T]."""
        return self.frame.view(tensor.broadcast_to(shape(self.term.score)))


@dataclass(frozen=True)
class Scored:
    """A matched score with the masks above it, outermost first; ``path`` holds the masking nodes."""

    match: Match
    masks: tuple[PlacedMask, ...] = ()
    path: tuple[Node, ...] = ()


@dataclass(frozen=True)
class IndexerSite:
    """A checked top-k."""

    topk: Node
    scored: Scored
    operands: dict[str, Operand]
    length: Length | None
    masks: tuple[PlacedMask, ...]
    uses: Uses
    batch: int


@dataclass(frozen=True)
class FuseLightningIndexer(FusionPass):
    """Replaces the selecting top-k of DeepSeek sparse attention, however it is spelled.

    Refused: values or order of the top-k used elsewhere, scores used elsewhere, another activation, factors that are
    not positive, the smallest instead of the largest, a key cache written between scoring and selection, operands of
    another layout or type.
    """

    name: ClassVar[str] = "fuse-lightning-indexer"
    summary: ClassVar[str] = "score, ReLU, head weights, mask and top-k become one lightning_indexer"
    fusion: ClassVar[bool] = True
    pattern: ClassVar[str] = (
        "a `topk` over masked scores that are a weighted sum over heads of relu(q k), as products, sums or matrix "
        "products, scales anywhere"
    )
    constraints: ClassVar[tuple[str, ...]] = (
        "the picks are used as a set: neither the values nor the order",
        "the scores are used nowhere else",
        "positive scales, the largest scores, a constant k",
        "the key cache is not written between scoring and picking",
        "bfloat16, float16 or float32",
        "a mask that is not provably causal stays an operand",
    )
    effect: ClassVar[str] = "`lightning_indexer`, with lengths or a mask"

    def anchors(self, graph: Graph) -> Sequence[Node]:
        """All top-k nodes."""
        return [node for node in graph.nodes if node.target is ATEN.topk.default]

    def check(self, program: CapturedProgram, anchor: Node) -> IndexerSite:
        """The indexer that ends at this top-k."""
        scored = find_score(anchor)
        evidence = scored.match.path
        try:
            return _checked(program.graph_module.graph, anchor, scored)
        except Refused as refusal:
            raise refusal.raised_to(len(evidence), evidence) from refusal

    def rewrite(self, program: CapturedProgram, site: IndexerSite) -> Node:
        """Put the operator before the top-k and hand its users over."""
        graph, topk, numbers = program.graph_module.graph, site.topk, site.scored.match.numbers
        lengths = None
        if site.length is not None:
            lengths = length_operand(graph, site.length, site.batch, topk)
        mask = _mask_operand(graph, site.masks, topk) if site.masks else None
        q, keys, weights = (build(graph, site.operands[name], topk) for name in ("q", "keys", "weights"))
        picks = call(
            graph,
            OPERATORS["lightning_indexer"].overload,
            (q, keys, weights, lengths, mask),
            {
                "k": argument(topk, "k"),
                "scale": numbers["before"] * numbers["between"] * numbers["after"],
                "descriptor": descriptor_of(program, keys),
            },
            like=topk,
            before=topk,
            replaces=[node for node in (*site.scored.path, *site.scored.match.path) if node.target in _NAMED] + [topk],
        )
        picks.meta["selects"] = topk.name
        redirect(graph, site.uses, picks)
        return picks


_NAMED = frozenset((ATEN.matmul.default, ATEN.bmm.default, ATEN.mm.default, ATEN.sum.dim_IntList, ATEN.relu.default))


def find_score(topk: Node) -> Scored:
    """The score below a top-k's masks. Refused with little or no score when nothing there resembles an indexer."""
    source = topk.args[0]
    assert isinstance(source, Node)
    if rank(source) == 3:
        frame = Frame.of("bst")
    elif rank(source) == 2:
        frame = Frame(("b", "s", "t"), lambda tensor: tensor.unsqueeze(1))
    else:
        raise Refused("its scores are not [B, S, T]", topk)
    trace = Trace()
    for scored in _scores(source, frame, Scored(Match()), trace):
        return scored
    keys = shape(source)[-1]
    miss = trace.deepest(lambda miss: miss.depth >= 1 and _above_product(miss.node, keys))
    if miss is None:
        raise Refused("its scores are no weighted sum of products", topk)
    raise Refused(miss.reason, miss.node, miss.depth, miss.matched)


def _scores(value: Node, frame: Frame, above: Scored, trace: Trace) -> Iterator[Scored]:
    """The readings of a tensor as masked scores, at most one per order of terms."""
    found = SCORE.match(value, frame, Match(), trace)
    if found is not None:
        yield replace(above, match=found)
        return
    base, chain = peel(value, casts="float")
    inner = frame.below(chain)
    path = (*above.path, *chain, base)
    scaled = scaling(base)
    if scaled is not None and scaled[1] > 0:
        yield from _scores(scaled[0], inner.operand(shape(base)), replace(above, path=path), trace)
    for score, term in mask_step(base):
        masks = (*above.masks, PlacedMask(term, inner))
        yield from _scores(score, inner.operand(shape(base)), replace(above, masks=masks, path=path), trace)


def _above_product(node: Node, keys: int, depth: int = 6) -> bool:
    """Whether a node with an unexpected operation sits over products with the keys, as an indexer's activation does."""
    for _ in range(depth):
        base, _chain = peel(node, casts="float")
        if packet(base) in PRODUCTS:
            return rank(base) >= 3 and keys in shape(base)
        inner = base.args[0] if base.args and packet(base) != "linear" else None
        if not isinstance(inner, Node) or shape(inner) != shape(base):
            return False
        node = inner
    return False


def _checked(graph: Graph, topk: Node, scored: Scored) -> IndexerSite:
    match = scored.match
    last = rank(cast("Node", topk.args[0])) - 1
    if argument(topk, "dim") not in (-1, last):
        raise Refused("the top-k does not run over the keys", topk)
    if not argument(topk, "largest"):
        raise Refused("the top-k takes the smallest scores", topk)
    if not isinstance(argument(topk, "k"), int):
        raise Refused("k is computed", topk)
    require_unused_elsewhere([*scored.path, *match.path], [topk])
    sizes = {**match.leaf("weights").sizes(), **match.leaf("q").sizes()}
    operands: dict[str, Operand] = {}
    for name, what, axes in OPERANDS:
        found = operand(what, match.leaf(name), axes, sizes)
        require_type(what, found.node, FLOATS)
        require_unwritten(graph, what, found, topk)
        operands[name] = found
    for mask in scored.masks:
        require_unwritten(graph, "the mask", Operand(mask.term.node, (), mask.term.score), topk)
    want = (sizes["b"], sizes["s"], sizes["t"])
    hidden = [atom for mask in scored.masks for atom in atoms(mask.term.node, mask.term.sense)]
    length = _length(graph, scored.masks, want)
    kept = scored.masks if hidden and length is None else ()
    return IndexerSite(topk, scored, operands, length, kept, uses_of(topk, hidden), want[0])


def _length(graph: Graph, masks: Sequence[PlacedMask], want: tuple[int, int, int]) -> Length | None:
    """The one length that all masks together stand for, or None."""
    found: list[Length] = []
    try:
        for mask in masks:
            for atom in atoms(mask.term.node, mask.term.sense):
                found.append(_length_of(atom, mask, want))
    except Refused:
        return None
    first = found[0] if found else None
    return first if first is not None and all(first.same_as(other, graph) for other in found[1:]) else None


def _length_of(atom: Atom, mask: PlacedMask, want: tuple[int, int, int]) -> Length:
    if atom.kind != "compare":
        raise Refused("the mask is no comparison of positions", atom.node)
    return length_of_mask(atom, mask.place, want)


def _mask_operand(graph: Graph, masks: Sequence[PlacedMask], before: Node) -> Node:
    """The masks as one bool tensor, True = visible, that expands to [B, S, T]."""
    result: Node | None = None
    for mask in masks:
        node = mask.term.node

        def emit(target: Any, *args: Any, like: Node = node) -> Node:
            return call(graph, target, args, like=like, before=before)

        if mask.term.sense == "drop":
            node = emit(ATEN.bitwise_not.default, node)
        elif mask.term.sense == "add":
            node = emit(ATEN.gt.Scalar, node, MASKED)
        scores = shape(mask.term.score)
        if len(scores) != 3:
            want = tuple(mask.place(torch.empty(shape(node), device="meta")).shape)
            node = emit(ATEN.reshape.default, emit(ATEN.expand.default, node, list(scores)), list(want))
        result = node if result is None else emit(ATEN.__and__.Tensor, result, node)
    assert result is not None
    return result
