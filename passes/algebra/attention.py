"""An attention in its two public spellings, the fused operator and softmax of a product, brought to one form."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.fx import Node

from kimigraph.passes.algebra.frames import Frame, Occurrence
from kimigraph.passes.algebra.layout import layout, peel
from kimigraph.passes.algebra.masks import MaskTerm, mask_step, selects, sense_of
from kimigraph.passes.algebra.match import Match, Trace
from kimigraph.passes.algebra.nodes import COPIES, FLOATS, argument, dtype, is_cast, is_number, packet, rank, shape
from kimigraph.passes.algebra.refusal import Refused
from kimigraph.passes.algebra.unify import Leaf, Op, Scaled, Sum

ATEN = torch.ops.aten
AXES = "bhst"
SCORE = Scaled("scale", Sum(Op("mul", Leaf("q"), Leaf("k")), "d"))


@dataclass(frozen=True)
class Attention:
    """softmax(scale * q k^T under ``masks``) v: q [B, H, S, D], k [B, H, T, D], v [B, H, T, V] in all spellings.

    ``out`` is the node to replace, [B, H, S, V]; ``path`` the nodes that vanish with it.
    """

    sink: Node
    out: Node
    q: Node
    k: Node
    v: Node
    scale: float
    masks: tuple[MaskTerm, ...]
    path: tuple[Node, ...]


def is_sink(node: Node) -> bool:
    """Whether an attention may be anchored here."""
    return node.target in (
        ATEN.scaled_dot_product_attention.default,
        ATEN.softmax.int,
        ATEN._softmax.default,
    )


def attention_at(sink: Node) -> Attention:
    """The attention around a sink. Refused without score when a softmax is none of an attention."""
    if sink.target is ATEN.scaled_dot_product_attention.default:
        return _fused(sink)
    return _spelled(sink)


def _fused(sink: Node) -> Attention:
    q, k, v = sink.args[:3]
    assert isinstance(q, Node) and isinstance(k, Node) and isinstance(v, Node)
    if argument(sink, "enable_gqa") or argument(sink, "is_causal") or argument(sink, "dropout_p"):
        raise Refused("grouped heads, built-in causality or dropout", sink)
    mask, scale = argument(sink, "attn_mask"), argument(sink, "scale")
    masks = (MaskTerm(mask, sense_of(mask), sink),) if isinstance(mask, Node) else ()
    factor = float(scale) if is_number(scale) else shape(q)[-1] ** -0.5
    return Attention(sink, sink, q, k, v, factor, masks, (sink,))


def _spelled(sink: Node) -> Attention:
    source = sink.args[0]
    assert isinstance(source, Node)
    if rank(source) != 4 or argument(sink, "dim") not in (-1, 3):
        raise Refused("the softmax is not over the keys of [B, H, S, T]", sink)
    match, masks, path = _score(source, Frame.of(AXES), (), ())
    try:
        out, weights_path = _weighted_sum(sink)
    except Refused as refusal:
        raise refusal.raised_to(1 if selects(masks) else 0) from refusal
    v = out.args[1]
    assert isinstance(v, Node)
    batch, heads, tokens, keys = shape(source)
    width = match.leaf("q").sizes()["d"]
    q = _node_of(match.leaf("q"), (batch, heads, tokens, width), (0, 1, 2))
    k = _node_of(match.leaf("k"), (batch, heads, keys, width), (0, 1, 3))
    return Attention(sink, out, q, k, v, match.numbers["scale"], masks, (*path, *match.path, sink, *weights_path))


def _score(
    value: Node, frame: Frame, masks: tuple[MaskTerm, ...], path: tuple[Node, ...]
) -> tuple[Match, tuple[MaskTerm, ...], tuple[Node, ...]]:
    match = SCORE.match(value, frame, Match(), Trace())
    if match is not None:
        return match, masks, path
    base, chain = peel(value, casts="float")
    if any(node.target not in COPIES and not is_cast(node) for node in chain):
        raise Refused("a view lies between scores and softmax", base)
    for score, term in mask_step(base):
        try:
            return _score(score, frame.operand(shape(base)), (*masks, term), (*path, *chain, base))
        except Refused:
            continue
    raise Refused("the softmax is not over a masked product", base)


def _weighted_sum(sink: Node) -> tuple[Node, list[Node]]:
    """The product of the weights with the values, and the copies and casts on the way to it."""
    node, path = sink, list[Node]()
    while True:
        users = [user for user in node.users if packet(user) != "_assert_tensor_metadata"]
        if len(users) != 1:
            raise Refused(f"the weights are used {len(users)} times", node)
        user = users[0]
        if user.target is ATEN.matmul.default and user.args[0] is node:
            return user, [*path, user]
        if user.target not in COPIES and not (is_cast(user) and dtype(user) in FLOATS):
            raise Refused(f"the weights go into {packet(user)}", user)
        path.append(user)
        node = user


def _node_of(leaf: Occurrence, want: Sequence[int], axes: Sequence[int]) -> Node:
    """The outermost node of the leaf's chain that has the wanted dims in order: views below it may still matter."""
    names = [AXES[axis] for axis in axes] + ["d"]
    for start in range(len(leaf.chain), -1, -1):
        node = leaf.node_at(start)
        found = leaf.strides(start)
        own = layout(node, ())
        if found is None or own is None or shape(node) != tuple(want):
            continue
        if all(found[0].get(name, 0) == stride for name, stride in zip(names, own.strides, strict=True)):
            return node
    raise Refused(f"no factor of the scores is {list(want)}", leaf.node)
