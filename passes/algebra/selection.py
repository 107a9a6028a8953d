"""Which keys an attention sees: the picks of an indexer, taken out of its mask."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.fx import Graph, Node

from kimigraph.ir.operators import OPERATORS
from kimigraph.passes.algebra.layout import Layout, base_tensor, contiguous, replay
from kimigraph.passes.algebra.lengths import Length, length_of_mask, length_of_node
from kimigraph.passes.algebra.masks import PICKING, Atom, MaskTerm, atoms, missing
from kimigraph.passes.algebra.nodes import argument, constant, dtype, packet, rank, shape
from kimigraph.passes.algebra.picks import source_of
from kimigraph.passes.algebra.refusal import Refused

INDEXER = OPERATORS["lightning_indexer"].overload


def selection_of(graph: Graph, sink: Node, masks: Sequence[MaskTerm], want: tuple[int, int, int]) -> Node | None:
    """The indices [B, S, K] that alone decide what an attention [B, H, S, T] sees, None without any.

    ``want`` is (B, S, T). Refused when a further mask, a mask per head or another selection has a say.
    """
    conditions = [atom for mask in masks for atom in atoms(mask.node, mask.sense)]
    chosen = [atom for atom in conditions if atom.kind in PICKING]
    if not chosen:
        return None
    if len({atom.key() for atom in chosen}) > 1:
        raise Refused("more than one selection masks the attention", chosen[1].node)
    rest = [atom for atom in conditions if atom.kind not in PICKING]
    for mask in masks:
        if rank(mask.node) == 4 and shape(mask.node)[1] != 1:
            raise Refused("the mask differs from head to head", mask.node)
    index = chosen[0].index
    assert index is not None
    _require_placed(chosen[0], masks, want)
    if chosen[0].kind == "counted":
        if rest:
            raise Refused(
                f"the attention has a mask besides its list: {rest[0].kind} {rest[0].node.name}", rest[0].node
            )
        return _listed(index, want)
    picks = source_of(index)
    if picks.target is not INDEXER:
        raise Refused("the selection is not that of an indexer that was fused", picks)
    if shape(picks)[:2] != want[:2] or shape(index)[:-1] != shape(chosen[0].node)[:-1]:
        raise Refused("the selection meets other queries than those it was made for", chosen[0].node)
    _require_indexers_mask(graph, picks, masks, rest, want)
    return picks


def visible_length(masks: Sequence[MaskTerm], want: tuple[int, int, int]) -> Length | None:
    """How many keys the queries of an attention without picks see, None where all; ``want`` is (B, S, T).

    Refused when its masks are anything but one causal length.
    """
    conditions = {atom.key(): atom for mask in masks for atom in atoms(mask.node, mask.sense)}
    if not conditions:
        return None
    for mask in masks:
        if rank(mask.node) == 4 and shape(mask.node)[1] != 1:
            raise Refused("the mask differs from head to head", mask.node)
    first, *further = conditions.values()
    if further:
        raise Refused("attention over all keys has masks besides a length", further[0].node)
    return _length(first, masks, want)


def _require_placed(atom: Atom, masks: Sequence[MaskTerm], want: tuple[int, int, int]) -> None:
    """Refuse unless row (b, s) of the selection hides keys of query (b, s), key by key."""
    for mask in masks:
        for other in atoms(mask.node, mask.sense):
            if other.key() == atom.key() and _seen(other, want) != contiguous(want):
                raise Refused("the selection meets other queries or keys than those it was made for", atom.node)


def _seen(atom: Atom, want: tuple[int, int, int]) -> Layout | None:
    """Where the elements of an atom's tensor meet [B, S, T]; None when that cannot be said."""
    try:
        return Layout.of(_place(want)(replay(atom.chain, base_tensor(atom.node))))
    except (RuntimeError, IndexError, TypeError):
        return None


def _listed(scatter_add: Node, want: tuple[int, int, int]) -> Node:
    """The list X behind ``scatter_add(zeros, -1, clamp(X, 0, T - 1), 0 <= X < T)``: -1 and T name nothing."""
    base, dim, index, value = scatter_add.args[:4]
    keys = shape(scatter_add)[-1]
    assert isinstance(index, Node) and isinstance(value, Node)
    clamp, valid = source_below_casts(index), source_below_casts(value)
    if constant(base) != 0 or dim not in (-1, rank(scatter_add) - 1) or packet(clamp) != "clamp":
        raise Refused("the list is counted in an unknown way", scatter_add)
    if (argument(clamp, "min"), argument(clamp, "max")) != (0, keys - 1):
        raise Refused("the list is clamped to another range", clamp)
    listed = clamp.args[0]
    if not isinstance(listed, Node) or packet(valid) not in ("__and__", "bitwise_and", "logical_and"):
        raise Refused("entries of the list are counted by another rule than their range", valid)
    bounds = {
        (packet(test), test.args[1]) for test in valid.args[:2] if isinstance(test, Node) and test.args[0] is listed
    }
    if bounds != {("ge", 0), ("lt", keys)}:
        raise Refused("entries of the list are counted by another rule than their range", valid)
    if shape(listed)[:2] != want[:2] or rank(listed) != 3 or dtype(listed) not in (torch.int32, torch.int64):
        raise Refused(f"the list is {dtype(listed)} {list(shape(listed))}, wanted int32 [B, S, K]", listed)
    return listed


def source_below_casts(node: Node) -> Node:
    """The node below casts and copies."""
    while packet(node) in ("_to_copy", "to", "clone", "contiguous"):
        inner = node.args[0]
        assert isinstance(inner, Node)
        node = inner
    return node


def _require_indexers_mask(
    graph: Graph, picks: Node, masks: Sequence[MaskTerm], rest: Sequence[Atom], want: tuple[int, int, int]
) -> None:
    """Refuse unless the attention hides, besides what was not picked, exactly what the indexer hid."""
    lengths, mask = argument(picks, "lengths"), argument(picks, "mask")
    hidden = atoms(mask, "keep") if isinstance(mask, Node) else []
    open_atoms = missing(rest, hidden)
    if isinstance(lengths, Node):
        wanted = length_of_node(lengths, picks)
        for atom in open_atoms:
            try:
                found = _length(atom, masks, want)
            except Refused as refusal:
                raise _further(atom) from refusal
            if not found.same_as(wanted, graph):
                raise Refused(f"the attention's mask {atom.node.name} is another length than the indexer's", atom.node)
        lost = [lengths] if not open_atoms else []
    elif open_atoms:
        raise Refused(
            f"the attention has a mask that the indexer has not: {open_atoms[0].node.name}", open_atoms[0].node
        )
    else:
        lost = []
    lost += [atom.node for atom in missing(hidden, rest)]
    if lost:
        raise Refused(f"the indexer hides keys that the attention shows: {lost[0].name}", masks[0].node)


def _further(atom: Atom) -> Refused:
    return Refused(f"the attention has a mask that the indexer has not: {atom.node.name}", atom.node)


def _length(atom: Atom, masks: Sequence[MaskTerm], want: tuple[int, int, int]) -> Length:
    for mask in masks:
        if atom.key() in {other.key() for other in atoms(mask.node, mask.sense)}:
            return length_of_mask(atom, _place(want), want)
    raise Refused("the mask is not of this attention", atom.node)


def _place(want: tuple[int, int, int]) -> Callable[[Tensor], Tensor]:
    """From a tensor of the mask's shape, broadcastable to [B, H, S, T], to [B, S, T]."""
    batch, tokens, keys = want

    def place(tensor: Tensor) -> Tensor:
        while tensor.dim() < 4:
            tensor = tensor.unsqueeze(0)
        return tensor.narrow(1, 0, 1).broadcast_to(batch, 1, tokens, keys).squeeze(1)

    return place
