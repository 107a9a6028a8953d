"""Undo compaction: ``x[:, keep]`` with ``keep = valid.any(0)`` gives an axis whose size depends on data.

A model may drop the entries of an axis that no row of the batch can use before it scores and picks among them. The
result is the same without the dropping when the mask under the top-k refuses those entries anyway and a refused pick
contributes nothing further on. Both are proved here, operator by operator, from the compaction to where the axis ends;
without a proof the graph stays, with a remark.

What is assumed: scores of unmasked entries are above the mask's fill value (not NaN or -inf); and which of several
equal scores a top-k picks is not part of its meaning (torch leaves it open, and it may depend on the axis' length).
"""

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from kimigraph.ir.fake import infer
from kimigraph.passes.algebra.refusal import Refused
from kimigraph.passes.cleanup.ragged import UNKNOWN, Ragged, States, rule_for, scatter_add_is_safe
from kimigraph.passes.cleanup.storage import StorageFacts

_ATEN = torch.ops.aten
_MASKED = -1e30
"""A score at or below this is a masked one."""
_SCALARS = (torch.SymInt, torch.SymBool, torch.SymFloat, int, float)
_PADS: frozenset[Any] = frozenset((_ATEN.pad.default, _ATEN.constant_pad_nd.default))


@dataclass(frozen=True)
class Compaction:
    """The sites ``index(x, [None, keep])`` of one ``keep``, which is ``any(valid, 0)``."""

    keep: Node
    valid: Node
    sites: tuple[Node, ...]


def find_compactions(graph: Graph) -> list[Compaction]:
    """Every compaction in the graph, by its ``keep``."""
    sites: dict[Node, list[Node]] = {}
    for node in graph.nodes:
        keep = _kept_by(node)
        if keep is not None:
            sites.setdefault(keep, []).append(node)
    found: list[Compaction] = []
    for keep, nodes in sites.items():
        valid = keep.args[0]
        assert isinstance(valid, Node)
        found.append(Compaction(keep, valid, tuple(nodes)))
    return found


def prove_removable(graph: Graph, compaction: Compaction, facts: StorageFacts) -> None:
    """Raise Refused, with reason and node, unless the graph computes the same without the compaction."""
    for site in compaction.sites:
        source = site.args[0]
        assert isinstance(source, Node)
        if facts.written_after(source, site):
            raise Refused("what it compacts is written later", site)
    _Walk(compaction).run(graph)


def remove_compaction(graph: Graph, compaction: Compaction) -> None:
    """Let every reader of the compacted tensors read the whole ones; shapes behind them become static."""
    for site in compaction.sites:
        source = site.args[0]
        assert isinstance(source, Node)
        site.replace_all_uses_with(source)
        graph.erase_node(site)


def fold_sizes(graph: Graph) -> int:
    """Infer shapes anew where they are symbolic and replace size arithmetic that is a number now; returns its count."""
    folded = 0
    for node in list(graph.nodes):
        if node.op != "call_function" or not _symbolic(node):
            continue
        value = infer(node)
        if isinstance(value, int | bool | float) and node.op == "call_function":
            _replace_by_literal(node, value)
            graph.erase_node(node)
            folded += 1
    return folded


class _Walk:
    """Follows the compacted axis from its sites to where it ends."""

    def __init__(self, compaction: Compaction) -> None:
        self.compaction = compaction
        self.states: States = {}
        self.sizes: set[Node] = set()
        self.refusals: dict[Node, bool] = {}
        self.picks: set[Node] = set()

    def run(self, graph: Graph) -> None:
        for node in graph.nodes:
            if node in self.compaction.sites:
                source = node.args[0]
                assert isinstance(source, Node)
                constant = False if source is self.compaction.valid else UNKNOWN
                self.states[node] = Ragged("entries", 1 - node.meta["val"].dim(), constant, self.compaction.keep)
            elif any(source in self.states or source in self.sizes for source in node.all_input_nodes):
                self._visit(node)

    def _visit(self, node: Node) -> None:
        if self._is_size(node):
            self.sizes.add(node)
        elif node.target in (_ATEN._assert_scalar.default, _ATEN._assert_tensor_metadata.default):
            return
        elif not any(source in self.states for source in node.all_input_nodes):
            raise Refused("it computes with the number of compacted entries", node)
        elif node.target is _ATEN.topk.default:
            self._top_k(node)
        elif node.args[:1] and node.args[0] in self.picks and node.target is operator.getitem:
            self._picked(node)
        elif node.target is _ATEN.gather.default:
            self._gather(node)
        elif node.target is _ATEN.index.Tensor:
            self._index(node)
        elif node.target is _ATEN.scatter_add.default:
            scatter_add_is_safe(node, self.states)
        else:
            rule = rule_for(node.target)
            if rule is None:
                raise Refused(f"{node.target} reads a compacted axis and has no rule here", node)
            self.states[node] = rule(node, self.states)
            self._check_sizes(node)

    def _check_sizes(self, node: Node) -> None:
        """No other axis may carry the compacted size, and a list filled up to a length must have room for all picks."""
        value, axis = node.meta["val"], self.states[node].axis
        symbolic = [position - value.dim() for position, size in enumerate(value.shape) if type(size) is not int]
        if symbolic not in ([], [axis]):
            raise Refused("another of its axes has the compacted size too", node)
        if node.target in _PADS and self._full_size(node.args[0], node) > value.shape[-1]:
            raise Refused("a list of all picks would be cut", node)

    def _full_size(self, source: Any, node: Node) -> int:
        """The length of the last axis of ``source`` when nothing is dropped."""
        size = source.meta["val"].shape[-1]
        if type(size) is int:
            return size
        entries = self.compaction.valid.meta["val"].shape[1]
        size = size.node.expr.subs(dict.fromkeys(size.node.expr.free_symbols, entries))
        if not size.is_Integer:
            raise Refused("its length cannot be computed", node)
        return int(size)

    def _is_size(self, node: Node) -> bool:
        """Whether the node is arithmetic on the size of a compacted axis (and not a value read out of a tensor)."""
        if node.target is _ATEN.sym_size.int:
            return True
        return isinstance(node.meta.get("val"), _SCALARS) and all(
            source in self.sizes for source in node.all_input_nodes
        )

    def _top_k(self, node: Node) -> None:
        """The mask under a top-k must refuse every entry that the compaction may have dropped."""
        scores = node.args[0]
        assert isinstance(scores, Node)
        state = self.states.get(scores)
        dim, largest = (list(node.args[2:]) + [-1, True][len(node.args[2:]) :])[:2]
        if state is None or state.stage != "entries" or state.axis != -1:
            raise Refused("it picks along another axis than the compacted one", node)
        if dim not in (-1, scores.meta["val"].dim() - 1) or not node.kwargs.get("largest", largest):
            raise Refused("it does not pick the largest along the compacted axis", node)
        if not self._counts_all(node.args[1]):
            raise Refused("how many it picks depends on how many entries are left", node)
        mask = scores.args[1] if scores.target is _ATEN.masked_fill.Scalar else None
        fill = scores.args[2] if mask is not None else 0
        if not isinstance(mask, Node) or mask not in self.states or not isinstance(fill, int | float) or fill > _MASKED:
            raise Refused("the scores under it carry no mask, so a dropped entry could be picked", node)
        if self.states[mask].constant is not True:
            raise Refused(
                f"the mask '{mask.name}' under it does not refuse what '{self.compaction.keep.name}' drops", node
            )
        self._note_refusal(mask, True)
        self.picks.add(node)
        self.states[node] = Ragged("picks", -1, UNKNOWN, node)

    def _counts_all(self, k: Any) -> bool:
        """Whether the whole axis yields as many unmasked picks: k is fixed, the axis' size, or their minimum."""
        if isinstance(k, int) or (isinstance(k, Node) and k.target is _ATEN.sym_size.int):
            return True
        return (
            isinstance(k, Node) and k.target is torch.sym_min and all(self._counts_all(argument) for argument in k.args)
        )

    def _note_refusal(self, mask: Node, value: bool) -> None:
        """``mask`` has ``value`` at exactly the refused entries; so has its negation's operand the opposite."""
        self.refusals[mask] = value
        inner = mask.args[0] if mask.target in (_ATEN.bitwise_not.default, _ATEN.logical_not.default) else None
        if isinstance(inner, Node):
            self._note_refusal(inner, not value)

    def _picked(self, node: Node) -> None:
        if node.args[1] != 1:
            if node.users:
                raise Refused("the values of the top-k are used", node)
            return
        source = node.args[0]
        assert isinstance(source, Node)
        self.states[node] = Ragged("picks", -1, UNKNOWN, source)

    def _gather(self, node: Node) -> None:
        table, dim, index = node.args[:3]
        assert isinstance(table, Node) and isinstance(index, Node) and isinstance(dim, int)
        rank = index.meta["val"].dim()
        self.states[node] = self._read(node, table, dim % rank - rank, index, self.refusals.get(table, UNKNOWN))

    def _index(self, node: Node) -> None:
        table, indices = node.args[0], node.args[1]
        assert isinstance(table, Node) and isinstance(indices, list | tuple)
        ragged = [(i, index) for i, index in enumerate(indices) if isinstance(index, Node) and index in self.states]
        if len(ragged) != 1 or not all(isinstance(index, Node) for index in indices):
            raise Refused("it selects from a compacted axis other than by picks", node)
        position, index = ragged[0]
        rank = table.meta["val"].dim()
        state = self._read(node, table, position - rank, index, UNKNOWN)
        self.states[node] = Ragged(state.stage, state.axis - (rank - len(indices)), state.constant, state.origin)

    def _read(self, node: Node, table: Node, axis: int, index: Node, constant: Any) -> Ragged:
        """A look-up through ``index``: picks may look into the compacted axis, anything else only elsewhere."""
        if index not in self.states:
            raise Refused("it looks into a compacted axis by positions that are no picks of it", node)
        state = self.states[index]
        if table not in self.states:
            return Ragged(state.stage, state.axis, UNKNOWN, state.origin)
        inside = self.states[table]
        if inside.stage != "entries" or inside.axis != axis or state.stage != "picks" or state.origin not in self.picks:
            raise Refused("it looks into a compacted axis by positions that are no picks of it", node)
        return Ragged("picks", state.axis, constant, state.origin)


def _kept_by(node: Node) -> Node | None:
    """The ``keep`` of a site, or None when the node is none."""
    if node.target is not _ATEN.index.Tensor or not isinstance(node.args[1], list | tuple) or len(node.args[1]) != 2:
        return None
    nothing, keep = node.args[1]
    if nothing is not None or not isinstance(keep, Node) or keep.target is not _ATEN.any.dim:
        return None
    valid = keep.args[0]
    if not isinstance(valid, Node) or valid.meta["val"].dim() != 2 or valid.meta["val"].dtype is not torch.bool:
        return None
    return keep if keep.args[1] in (0, -2) and not (len(keep.args) > 2 and keep.args[2]) else None


def _symbolic(node: Node) -> bool:
    value = node.meta.get("val")
    values = value if isinstance(value, list | tuple) else [value]
    return any(
        isinstance(item, torch.SymInt | torch.SymBool | torch.SymFloat)
        or (isinstance(item, torch.Tensor) and any(type(size) is not int for size in (*item.shape, *item.stride())))
        for item in values
    )


def _replace_by_literal(node: Node, value: int | bool | float) -> None:
    def swap(argument: Any) -> Any:
        if isinstance(argument, list | tuple):
            return type(argument)(swap(item) for item in argument)
        return value if argument is node else argument

    for user in list(node.users):
        user.args = tuple(swap(argument) for argument in user.args)
        user.kwargs = {key: swap(argument) for key, argument in user.kwargs.items()}
