"""Who uses the indices of a top-k, and whether a set that ends in -1 can take their place.

torch's top-k always names k keys, in the order of their scores; the Lightning Indexer names the visible ones among them
in ascending order, then -1. Both are the same to a consumer that neither sees the order nor a hidden key.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

import torch
from torch.fx import Graph, Node

from kimigraph.passes.algebra.layout import contiguous, layout
from kimigraph.passes.algebra.masks import Atom, Sense, atoms, is_mask, missing, sense_of
from kimigraph.passes.algebra.nodes import argument, constant, described, is_cast, is_view, packet, rank, shape
from kimigraph.passes.algebra.refusal import Refused
from kimigraph.passes.algebra.rewrite import call, replace

ATEN = torch.ops.aten
SHAPE_ONLY = frozenset(("new_ones", "new_zeros", "new_empty", "new_full", "zeros_like", "ones_like", "empty_like"))
LOGIC = frozenset("bitwise_not logical_not __and__ __or__ ge gt le lt eq ne where masked_fill".split())
ELEMENTWISE = LOGIC | frozenset("add sub mul clamp clamp_min clone contiguous".split())
JOINING = frozenset(("cat", "pad", "constant_pad_nd"))


@dataclass
class Uses:
    """The uses of the indices: ``validity`` asks whether a pick is visible, ``sets`` mark the picked keys, ``lists``
    read tables or compute with the picks."""

    index: list[Node]
    validity: list[Node] = field(default_factory=lambda: [])
    sets: list[Node] = field(default_factory=lambda: [])
    lists: list[Node] = field(default_factory=lambda: [])


def uses_of(topk: Node, hidden: Sequence[Atom]) -> Uses:
    """All uses of a top-k's indices; ``hidden`` are the atoms of its mask.

    Refused, with the node at fault, when the values or the order are used, or when a hidden key would be noticed.
    """
    items = list(topk.users)
    for item in items:
        if packet(item) != "getitem" or item.args[1] != 1:
            if item.users or packet(item) != "getitem":
                raise Refused("the values of the top-k are used", item)
    uses = Uses([item for item in items if item.args[1] == 1])
    derived: set[Node] = set()
    for item in uses.index:
        _walk(item, uses, derived, hidden, direct=True, picked=shape(item)[-1])
    _require_no_order(derived)
    if hidden:
        for node in uses.sets:
            _require_masked(node, hidden)
        for node in uses.lists:
            _require_guarded(node, uses.validity)
    return uses


def _walk(node: Node, uses: Uses, derived: set[Node], hidden: Sequence[Atom], direct: bool, picked: int) -> None:
    """Sort the users of ``node``: the indices themselves (``direct``) or what was computed from them.

    ``picked`` is how many keys a row names.
    """
    if node in derived:
        return
    derived.add(node)
    for user in node.users:
        name = packet(user)
        if name in SHAPE_ONLY or name == "_assert_tensor_metadata":
            continue
        if is_cast(user) or (is_view(user) and keeps_rows(user)):
            _walk(user, uses, derived, hidden, direct, picked)
        elif direct and name == "scatter" and _along_picks(user, node, picked) and _marks_alike(user):
            uses.sets.append(user)
        elif name == "scatter_add" and _on_last(user) and not direct:
            continue
        elif direct and name == "gather" and _along_picks(user, node, picked):
            (uses.validity if _is_validity(user, hidden) else uses.lists).append(user)
            _walk(user, uses, derived, hidden, False, picked)
        elif direct and name == "index" and _looks_up(user, node, picked):
            uses.lists.append(user)
            _walk(user, uses, derived, hidden, False, picked)
        elif not direct and name in ELEMENTWISE | JOINING:
            _walk(user, uses, derived, hidden, False, picked)
        else:
            raise Refused(f"the order of the top-k is used by {described(user)}", user)


def keeps_rows(view: Node) -> bool:
    """Whether a view of a list of picks keeps each row whole and the rows in order; it may repeat them.

    A part of a row depends on the order of the picks, and other rows are the picks of other queries.
    """
    source = view.args[0]
    if not isinstance(source, Node):
        return False
    found = layout(source, [view])
    if found is None or found.offset:
        return False
    dims = [(size, stride) for size, stride in zip(found.shape, found.strides, strict=True) if stride]
    sizes = tuple(size for size, _ in dims)
    return tuple(stride for _, stride in dims) == contiguous(sizes).strides and prod(sizes) == prod(shape(source))


def _along_picks(user: Node, node: Node, picked: int) -> bool:
    """Whether ``user`` indexes its last dim by all picks of a row at once."""
    return argument(user, "index") is node and _on_last(user) and shape(node)[-1] == picked


def _marks_alike(scatter: Node) -> bool:
    """Whether all picks of a row are given one value, whatever their order."""
    if argument(scatter, "reduce") is not None:
        return False
    return constant(argument(scatter, "value", argument(scatter, "src"))) is not None


def _on_last(node: Node) -> bool:
    source = node.args[0]
    return isinstance(source, Node) and argument(node, "dim") in (-1, rank(source) - 1)


def _is_validity(gather: Node, hidden: Sequence[Atom]) -> bool:
    table = gather.args[0]
    if not isinstance(table, Node) or table.meta["val"].dtype is not torch.bool or not hidden:
        return False
    found = atoms(table, "keep")
    return not missing(found, hidden) and not missing(hidden, found)


def _looks_up(user: Node, node: Node, picked: int) -> bool:
    """Whether the picks are the last of some indices, and the others are the same for all picks of a row."""
    indices = argument(user, "indices")
    if not isinstance(indices, list | tuple) or indices[-1] is not node or user.args[0] is node:
        return False
    others = [other for other in indices[:-1] if isinstance(other, Node)]
    return shape(node)[-1] == picked and all(shape(other)[-1:] in ((), (1,)) for other in others)


def _require_no_order(derived: set[Node]) -> None:
    """A list of picks may meet only itself, or what is the same for all picks of a row: else its order matters."""
    for node in derived:
        for user in node.users:
            if packet(user) == "scatter_add":
                _require_counted(user, derived)
        if packet(node) not in ELEMENTWISE:
            continue
        for other in node.all_input_nodes:
            along = shape(other)[2:]
            if other not in derived and constant(other) is None and any(size != 1 for size in along):
                raise Refused(f"the order of the top-k meets {other.name}", node)


def _require_counted(scatter_add: Node, derived: set[Node]) -> None:
    """A count of listed keys: each entry adds one value, or one that was computed from the entry itself."""
    base, _dim, index, value = scatter_add.args[:4]
    known = value in derived or constant(value) is not None
    if base in derived or index not in derived or not known:
        raise Refused(f"the order of the top-k is used by {described(scatter_add)}", scatter_add)


def _require_masked(scatter: Node, hidden: Sequence[Atom]) -> None:
    """Each attention that sees the marked keys must hide what the indexer hides: a hidden pick then changes nothing."""
    for mask, sense in final_masks(scatter):
        lost = missing(hidden, atoms(mask, sense))
        if lost:
            raise Refused(f"the picks are used without the indexer's mask {lost[0].node.name}", mask)


def final_masks(node: Node) -> list[tuple[Node, Sense]]:
    """The masks into which a mask goes, as scores meet them. Refused at a use that is no masking."""
    found: list[tuple[Node, Sense]] = []
    for user in node.users:
        name = packet(user)
        if name == "scaled_dot_product_attention" and argument(user, "attn_mask") is node:
            found.append((node, sense_of(node)))
        elif is_view(user) or is_cast(user) or name in SHAPE_ONLY or is_mask(user):
            found.extend(final_masks(user) if name not in SHAPE_ONLY else [])
        elif name == "masked_fill" and user.args[1] is node:
            found.append((node, "drop"))
        elif name == "where" and user.args[0] is node:
            found.append((node, "keep" if constant(user.args[2]) is not None else "drop"))
        elif name == "add":
            found.append((node, "add"))
        else:
            raise Refused(f"the picked keys are used by {described(user)}", user)
    return found


def _require_guarded(node: Node, validity: Sequence[Node]) -> None:
    """What is read through a pick must be hidden again where the pick is none."""
    for user in node.users:
        if is_view(user) or is_cast(user):
            _require_guarded(user, validity)
        elif packet(user) != "masked_fill" or not _covers(user, validity):
            raise Refused("what is read through a hidden pick is used", user)


def _covers(fill: Node, validity: Sequence[Node]) -> bool:
    mask = fill.args[1]
    return isinstance(mask, Node) and any(atom.node in validity for atom in atoms(mask, "drop"))


def redirect(graph: Graph, uses: Uses, picks: Node) -> None:
    """Let all users of the indices read the indexer's result instead: -1 becomes 0 where a number must be a key."""
    for gather in uses.validity:
        visible = call(graph, ATEN.ge.Scalar, (picks, 0), like=gather, before=gather)
        replace(gather, visible)
    live = [item for item in uses.index if item.users]
    if not live:
        return
    first = picks.next
    while first.op != "output" and first not in live:
        first = first.next
    safe = call(graph, ATEN.clamp_min.default, (picks, 0), like=live[0], after=first)
    wide = call(graph, ATEN._to_copy.default, (safe,), {"dtype": live[0].meta["val"].dtype}, like=live[0], after=safe)
    for item in live:
        replace(item, wide)


def source_of(index: Node) -> Node:
    """The node that lists the picks, below views, casts and the clamping of -1."""
    while True:
        if (
            is_cast(index)
            or (is_view(index) and keeps_rows(index))
            or (packet(index) == "clamp_min" and index.args[1] == 0)
        ):
            inner = index.args[0]
            assert isinstance(inner, Node)
            index = inner
        else:
            return index
