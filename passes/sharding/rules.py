"""How operators of ATen carry shares on: each rule says where the result lies and rewrites sizes that the call names.

A rule gets the walk (``Walk``) and the node. It raises ``NotCarried`` where the shares do not fit the operator.
"""

from collections.abc import Callable
from typing import Any, cast

from torch._ops import OpOverload
from torch.fx import Node

from kimigraph.ir.shares import Share
from kimigraph.passes.algebra.nodes import argument
from kimigraph.passes.sharding.placement import PARTIAL, NotCarried, Placement, Placements, Walk
from kimigraph.passes.sharding.views import viewed

Rule = Callable[[Walk, Node], Placements]
TAKES_PARTIAL = frozenset(("view", "_unsafe_view", "reshape", "add", "getitem", "clone"))
"""Operators that may give partial sums for partial sums."""


def pointwise(walk: Walk, node: Node) -> Placement:
    """Operands of one share, aligned from the last dim, and whole ones that are alike along it."""
    shape, found = walk.shape(node), dict[Share, Node]()
    for operand in node.all_input_nodes:
        if (share := walk.share(operand)) is not None:
            dim = share.dim + len(shape) - len(walk.shape(operand))
            if shape[dim] != walk.shape(operand)[share.dim]:
                raise NotCarried(f"{operand.name} is repeated along the dim that ranks share")
            found[share.at(dim)] = operand
    if len(found) > 1:
        raise NotCarried(f"{', '.join(operand.name for operand in found.values())} are shared out differently")
    [share] = found
    for operand in node.all_input_nodes:
        own = walk.shape(operand) if walk.share(operand) is None else ()
        dim = share.dim - len(shape) + len(own)
        if own and dim >= 0 and own[dim] != 1:
            raise NotCarried(f"{operand.name} is whole along the dim that ranks share")
    return share


def _add(walk: Walk, node: Node) -> Placement:
    placed = [walk.of(operand) for operand in node.all_input_nodes]
    if PARTIAL not in placed:
        return pointwise(walk, node)
    # A sum that is known already is not summed up once more: it would be rounded on its way.
    if len(placed) == 2 and set(placed) == {PARTIAL} and walk.reduced.keys().isdisjoint(node.all_input_nodes):
        return PARTIAL
    raise NotCarried("partial sums are added to a whole value")


def _view(walk: Walk, node: Node) -> Placement:
    source = _first(node)
    share = walk.share(source)
    if share is None:
        return PARTIAL
    moved = viewed(share, walk.shape(source), walk.shape(node))
    node.update_arg(1, list(moved.local(walk.shape(node))))
    return moved


def _clone(walk: Walk, node: Node) -> Placement:
    return walk.of(_first(node))


def _permute(walk: Walk, node: Node) -> Placement:
    share, order = _share(walk, node), cast("list[int]", node.args[1])
    rank = len(order)
    return share.at([dim % rank for dim in order].index(share.dim))


def _transpose(walk: Walk, node: Node) -> Placement:
    share, rank = _share(walk, node), len(walk.shape(node))
    a, b = _integer(node, 1) % rank, _integer(node, 2) % rank
    return share.at({a: b, b: a}.get(share.dim, share.dim))


def _unsqueeze(walk: Walk, node: Node) -> Placement:
    share, at = _share(walk, node), _integer(node, 1) % len(walk.shape(node))
    return share.at(share.dim + (at <= share.dim))


def _squeeze(walk: Walk, node: Node) -> Placement:
    share = _share(walk, node)
    return viewed(share, walk.shape(_first(node)), walk.shape(node))


def _expand(walk: Walk, node: Node) -> Placement:
    share, shape = _share(walk, node), walk.shape(node)
    dim = share.dim + len(shape) - len(walk.shape(_first(node)))
    moved = share.at(dim)
    node.update_arg(1, list(moved.local(shape)))
    return moved


def _select(walk: Walk, node: Node) -> Placement:
    share, dim = _share(walk, node), _integer(node, 1) % len(walk.shape(_first(node)))
    if dim == share.dim:
        raise NotCarried("it takes one entry of the dim that ranks share")
    return share.at(share.dim - (dim < share.dim))


def _slice(walk: Walk, node: Node) -> Placement:
    share, source = _share(walk, node), walk.shape(_first(node))
    dim, size = int(argument(node, "dim")) % len(source), source[share.dim]
    if dim != share.dim or walk.shape(node) == source:
        return share
    begin, end = _bounds(node, size)
    block = size // share.blocks
    if argument(node, "step") != 1 or begin % block or end % block or begin >= end:
        raise NotCarried("it takes a part of the dim that ranks share")
    node.args = (node.args[0], dim, begin // share.ways, end // share.ways)
    return share.in_blocks((end - begin) // block)


def _bounds(node: Node, size: int) -> tuple[int, int]:
    begin, end = argument(node, "start") or 0, argument(node, "end")
    end = size if end is None else min(end, size)
    return begin + (size if begin < 0 else 0), end + (size if end < 0 else 0)


def _split(walk: Walk, node: Node) -> Placements:
    share, source = _share(walk, node), walk.shape(_first(node))
    dim = int(argument(node, "dim")) % len(source)
    pieces = [tuple(value.shape) for value in walk.whole[node]]
    if dim != share.dim:
        return (share,) * len(pieces)
    block = source[dim] // share.blocks
    if any(piece[dim] % block for piece in pieces):
        raise NotCarried("it splits the dim that ranks share within a block")
    sizes = [piece[dim] // share.ways for piece in pieces]
    node.update_arg(1, sizes if isinstance(node.args[1], list | tuple) else sizes[0])
    return tuple(share.in_blocks(piece[dim] // block) for piece in pieces)


def _getitem(walk: Walk, node: Node) -> Placement:
    placed, index = walk.placed[_first(node)], _integer(node, 1)
    if isinstance(placed, tuple) and not isinstance(placed, Share):
        return placed[index]
    raise NotCarried("it takes an entry of a value that is no list")


def _cat(walk: Walk, node: Node) -> Placement:
    parts = cast("list[Node]", node.args[0])
    shares = [walk.share(part) for part in parts]
    dim = int(argument(node, "dim") or 0) % len(walk.shape(node))
    first = shares[0]
    if first is None or any(share != first for share in shares):
        raise NotCarried("its parts are shared out differently")
    if dim != first.dim:
        return first
    if len({walk.shape(part)[dim] for part in parts}) > 1:
        raise NotCarried("its parts differ in size along the dim that ranks share")
    return first.in_blocks(first.blocks * len(parts))


def _linear(walk: Walk, node: Node) -> Placement:
    x, weight, bias = node.args[0], node.args[1], argument(node, "bias")
    given, held, last = walk.share(x), walk.share(weight), len(walk.shape(node)) - 1
    if given is None and held is not None and held.dim == 0 and (bias is None or walk.share(bias) is not None):
        return held.at(last)
    if given is not None and held is not None and held.dim == 1 and bias is None and _same(given, held, last):
        return PARTIAL
    if given is not None and held is None and given.dim < last and (bias is None or walk.share(bias) is None):
        return given
    raise NotCarried("the columns of one operand are not the rows of the other")


def _same(given: Share, held: Share, last: int) -> bool:
    return given.dim == last and given.blocks == held.blocks


def _batched(walk: Walk, node: Node) -> Placement:
    """Products of batches of matrices of which ranks share a dim of the batch."""
    shape = walk.shape(node)
    for operand in node.all_input_nodes:
        share = walk.share(operand)
        if share is not None and share.dim >= len(walk.shape(operand)) - 2:
            raise NotCarried("ranks share rows or columns of the matrices")
    if any(len(walk.shape(operand)) != len(shape) for operand in node.all_input_nodes):
        raise NotCarried("its operands have different numbers of dims")
    return pointwise(walk, node)


def _attention(walk: Walk, node: Node) -> Placement:
    operands = node.all_input_nodes[:3]
    shares = {walk.share(item) for item in operands}
    [share, *others] = shares
    if share is None or others or share.dim != 1 or any(walk.share(item) for item in node.all_input_nodes[3:]):
        raise NotCarried("queries, keys and values do not have the same heads")
    return share


def _embedding(walk: Walk, node: Node) -> Placement:
    share = walk.share(node.args[0])
    if share is None or share.dim != 1:
        raise NotCarried("ranks share the rows of the table")
    return share.at(len(walk.shape(node)) - 1)


def _along(walk: Walk, node: Node) -> Placement:
    """Softmax and its like: any dim but the one that they work along."""
    share, dim = _share(walk, node), _integer(node, 1)
    if dim % len(walk.shape(node)) == share.dim:
        raise NotCarried("it works along the dim that ranks share")
    return share


def _reduction(walk: Walk, node: Node) -> Placement:
    share, source = _share(walk, node), walk.shape(_first(node))
    dims = argument(node, "dim")
    dims = range(len(source)) if dims is None or dims == [] else dims if isinstance(dims, list | tuple) else [dims]
    reduced = {int(dim) % len(source) for dim in dims}
    if share.dim in reduced:
        raise NotCarried("it reduces the dim that ranks share")
    if len(walk.shape(node)) == len(source):
        return share
    return share.at(share.dim - sum(dim < share.dim for dim in reduced))


def _convolution(walk: Walk, node: Node) -> Placement:
    """A depthwise one: each channel has a filter of its own."""
    given, held, groups = walk.share(node.args[0]), walk.share(node.args[1]), argument(node, "groups")
    if given is None or held != given.at(0) or given.dim != 1 or groups != walk.shape(node)[1]:
        raise NotCarried("channels and filters are shared out differently")
    names = [declared.name for declared in cast(OpOverload, node.target)._schema.arguments]
    node.args = tuple(groups // walk.ways if name == "groups" else argument(node, name) for name in names)
    node.kwargs = {}
    return given


def _pad(walk: Walk, node: Node) -> Placement:
    share = _share(walk, node)
    if walk.shape(node)[share.dim] != walk.shape(_first(node))[share.dim]:
        raise NotCarried("it pads the dim that ranks share")
    return share


def _copy(walk: Walk, node: Node) -> Placement:
    share, given = walk.share(node.args[0]), walk.share(node.args[1])
    if share is None or share != given:
        raise NotCarried("what is written is shared out otherwise")
    return share


def _first(node: Node) -> Node:
    return node.all_input_nodes[0]


def _share(walk: Walk, node: Node) -> Share:
    share = walk.share(_first(node))
    if share is None:
        raise NotCarried("an operand that is not a tensor's is shared out")
    return share


def _integer(node: Node, place: int) -> int:
    value: Any = node.args[place]
    return int(value)


RULES: dict[str, Rule] = {
    **dict.fromkeys(("view", "_unsafe_view", "reshape"), _view),
    **dict.fromkeys(("clone", "contiguous", "alias", "detach"), _clone),
    **dict.fromkeys(("_to_copy", "to", "where"), pointwise),
    **dict.fromkeys(("split", "split_with_sizes"), _split),
    **dict.fromkeys(("bmm", "matmul"), _batched),
    **dict.fromkeys(("_softmax", "softmax", "_log_softmax", "cumsum"), _along),
    **dict.fromkeys(("sum", "mean", "amax", "amin"), _reduction),
    "add": _add,
    "permute": _permute,
    "transpose": _transpose,
    "unsqueeze": _unsqueeze,
    "squeeze": _squeeze,
    "expand": _expand,
    "select": _select,
    "slice": _slice,
    "getitem": _getitem,
    "cat": _cat,
    "linear": _linear,
    "scaled_dot_product_attention": _attention,
    "embedding": _embedding,
    "conv1d": _convolution,
    "constant_pad_nd": _pad,
    "copy_": _copy,
}
"""By the operator's name without overload."""
