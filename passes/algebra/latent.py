"""Multi-head latent attention: keys and values that are one bias-free linear of a cached latent."""

from dataclasses import dataclass
from math import prod

from torch.fx import Node

from kimigraph.passes.algebra.attention import Attention
from kimigraph.passes.algebra.frames import Frame, Occurrence, Operand, operand
from kimigraph.passes.algebra.layout import Layout, layout, peel
from kimigraph.passes.algebra.nodes import FLOATS, argument, dtype, packet, rank, shape
from kimigraph.passes.algebra.pieces import Piece, pieces, require_cover
from kimigraph.passes.algebra.refusal import Refused


@dataclass(frozen=True)
class LatentExpansion:
    """Where keys and values of an attention come from.

    ``weight`` [H * per, L] holds ``per`` rows a head; a head's key rows begin at ``key_row``, its value rows at
    ``value_row``. ``nope`` and ``rope`` are the columns of the keys that come from the latent and from the shared part.
    """

    weight: Node
    per_head: int
    key_row: int
    value_row: int
    nope: Piece
    rope: Piece | None
    latent: Operand
    rope_cache: Operand | None
    batch: int
    heads: int
    tokens: int
    keys: int
    value_width: int

    @property
    def latent_width(self) -> int:
        """Columns of the latent."""
        return shape(self.weight)[1]


def expansion_of(attention: Attention) -> LatentExpansion:
    """The latent expansion behind an attention. Refused without score when its values are no linear of one tensor."""
    if rank(attention.q) != 4 or rank(attention.k) != 4 or rank(attention.v) != 4:
        raise Refused("queries, keys and values are not [B, H, ., .]", attention.sink)
    batch, heads, tokens, width = shape(attention.q)
    keys, value_width = shape(attention.k)[2], shape(attention.v)[3]
    linear, value_chain = peel(attention.v, casts="none")
    if packet(linear) != "linear" or (len(linear.args) > 2 and linear.args[2] is not None):
        raise Refused("the values are no bias-free linear of a latent", linear)
    parts = pieces(attention.k)
    require_cover(parts, width, attention.k)
    weight, hidden = argument(linear, "weight"), argument(linear, "input")
    assert isinstance(weight, Node) and isinstance(hidden, Node)
    per_head = shape(weight)[0] // heads
    nope, rope, key_row = _split_keys(attention, parts, linear, per_head)
    value_row = _row(
        "values", attention.v, linear, layout(linear, value_chain), (batch, heads, keys, value_width), per_head
    )
    if not (key_row + nope.width <= value_row or value_row + value_width <= key_row):
        raise Refused("keys and values share rows of the weight", attention.v)
    sizes = {"b": batch, "t": keys, "l": shape(weight)[1]}
    latent = _cache("the latent", hidden, linear, "btl", sizes)
    rope_cache = _rope_cache(rope, batch, heads, keys, attention)
    expansion = LatentExpansion(
        weight, per_head, key_row, value_row, nope, rope, latent, rope_cache, batch, heads, tokens, keys, value_width
    )
    _require_types(expansion)
    return expansion


def _split_keys(
    attention: Attention, parts: list[Piece], linear: Node, per_head: int
) -> tuple[Piece, Piece | None, int]:
    nope: Piece | None = None
    rope: Piece | None = None
    key_row = 0
    for part in parts:
        base, chain = peel(part.node, casts="none")
        if base is linear and nope is None:
            want = (*shape(attention.k)[:3], part.width)
            key_row = _row("keys", part.node, linear, layout(linear, chain), want, per_head)
            nope = part
        elif rope is None:
            rope = part
        else:
            raise Refused("the keys have more than a latent and a shared part", part.node)
    if nope is None:
        raise Refused("no part of the keys comes from the linear of the values", attention.k)
    return nope, rope, key_row


def _row(what: str, node: Node, linear: Node, found: Layout | None, want: tuple[int, ...], per_head: int) -> int:
    """The first row of a head: the offset of [B, H, T, width] in the linear's [B, T, H * per]."""
    _batch, heads, keys, width = want
    total = heads * per_head
    offset = found.offset if found is not None else 0
    wanted = (keys * total, per_head, total, 1)
    strides = tuple(0 if size == 1 else stride for size, stride in zip(want, wanted, strict=True))
    if found != Layout(want, strides, offset) or shape(linear)[-1] != total or offset + width > per_head:
        raise Refused(
            f"the {what} have layout {found} over {linear.name}, wanted {Layout(want, strides, offset)}", node
        )
    return offset


def _cache(what: str, node: Node, reader: Node, axes: str, sizes: dict[str, int]) -> Operand:
    """The node that holds [B, T, .] below the input of the expanding linear."""
    base, chain = peel(node)
    dims = list(shape(node))
    frame = Frame(tuple(axes), lambda tensor: tensor.view([sizes[axis] for axis in axes]))
    if prod(dims[:-1]) != sizes["b"] * sizes["t"]:
        raise Refused(f"{what} has {dims}, wanted [B, T, L]", node)
    return operand(what, Occurrence(node, base, tuple(chain), frame, reader), axes, sizes)


def _rope_cache(rope: Piece | None, batch: int, heads: int, keys: int, attention: Attention) -> Operand | None:
    if rope is None:
        return None
    base, chain = peel(rope.node)
    sizes = {"b": batch, "t": keys, "r": rope.width}
    leaf = Occurrence(rope.node, base, tuple(chain), Frame.of("bhtr"), rope.reader or attention.sink)
    return operand("the shared part of the keys", leaf, "btr", sizes)


def _require_types(expansion: LatentExpansion) -> None:
    for found in (expansion.latent, expansion.rope_cache):
        if found is not None and dtype(found.node) not in FLOATS:
            raise Refused(f"the cache is {dtype(found.node)}", found.node)
    if dtype(expansion.weight) != dtype(expansion.latent.node):
        raise Refused("weight and latent differ in type", expansion.weight)
