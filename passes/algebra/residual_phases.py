"""Attention residuals in two phases: blocks that many sublayers share are mixed once under all their queries.

Phase one is ``attention_residual_history``, phase two ``attention_residual_merge`` in place of each sublayer's own
``attention_residual``. It reads the blocks once instead of once a sublayer and writes an fp32 mixture for each, so what
is cheaper depends on how many blocks and how many sublayers there are; the cost model decides.
"""

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.fx import Graph, Node

from kimigraph.ir.cost import Work, serial_seconds, work_of
from kimigraph.ir.device import Device
from kimigraph.ir.errors import UsageError
from kimigraph.ir.operators import OPERATORS
from kimigraph.ir.operators.registry import Cost
from kimigraph.ir.provenance import source_line
from kimigraph.ir.purity import storage_root, written_between
from kimigraph.ir.remarks import Remark
from kimigraph.passes.algebra.layout import contiguous, layout, peel
from kimigraph.passes.algebra.nodes import shape
from kimigraph.passes.algebra.rewrite import call, replace
from kimigraph.passes.base import PassContext

ATEN = torch.ops.aten
PHASES = ("auto", "one", "two")
MOST_QUERIES = 8
"""Queries of one ``attention_residual_history``: as many pointers as its kernel takes."""
WORTH = 0.6
"""Two phases are taken when their estimate is below that part of one pass each.

On an H200 the estimates flatter them: 8 sublayers over 8 blocks took 53 us in two phases and 49 us in one pass each at
64 tokens, 243 and 205 us at 512. At a single token it was 25 and 31 us, which neither bytes nor launches explain.
"""
PASS_NAME = "raise-attention-residual"


@dataclass(frozen=True)
class Residual:
    """One ``attention_residual`` with its operands."""

    node: Node
    blocks: tuple[Node, ...]
    partial: Node
    query: Node
    norm_weight: Node | None
    out_norm_weight: Node | None

    @classmethod
    def of(cls, node: Node) -> "Residual":
        """The operands of a node that ``raise-attention-residual`` made."""
        arguments = cast("tuple[Sequence[Node], Node, Node | None, Node | None]", node.args)
        sources, query, norm_weight, out_norm_weight = arguments
        return cls(node, tuple(sources[:-1]), sources[-1], query, norm_weight, out_norm_weight)


@dataclass(frozen=True)
class Group:
    """Residuals over the same finished blocks, each with a running sum of its own, in graph order."""

    residuals: tuple[Residual, ...]

    @property
    def first(self) -> Residual:
        """The one before which the blocks are mixed."""
        return self.residuals[0]

    def batches(self) -> list[tuple[Residual, ...]]:
        """The residuals, so many at a time as one history serves."""
        starts = range(0, len(self.residuals), MOST_QUERIES)
        return [self.residuals[start : start + MOST_QUERIES] for start in starts]


def choose_phases(graph: Graph, context: PassContext, phases: str) -> tuple[dict[str, Node], list[Remark]]:
    """Split the groups where it pays, or as ``phases`` says; the merges by what they replace, and a note a group.

    Raises UsageError for other ``phases`` than auto, one and two.
    """
    if phases not in PHASES:
        raise UsageError(f"pass '{PASS_NAME}': option 'phases' is one of {', '.join(PHASES)}, not '{phases}'.")
    merges: dict[str, Node] = {}
    notes: list[Remark] = []
    for group in _groups(graph):
        chosen, reason = _decide(group, context.device, phases)
        first = group.first.node
        if chosen and not context.allow(f"two phases of {first.name} ({source_line(first) or 'no source line'})"):
            continue
        if chosen:
            merges |= _split(graph, group)
        shown = merges.get(first.name, first)
        notes.append(Remark("note", PASS_NAME, reason, shown.name, source_line(shown)))
    return merges, notes


def _groups(graph: Graph) -> list[Group]:
    """Residuals that differ in their last source, of one form, whose blocks and weights can be read at the first."""
    found: dict[tuple[Any, ...], list[Residual]] = {}
    for node in graph.nodes:
        if node.target is OPERATORS["attention_residual"].overload:
            one = Residual.of(node)
            found.setdefault((one.blocks, node.kwargs["eps"], one.norm_weight is None), []).append(one)
    groups = [Group(tuple(residuals)) for residuals in found.values() if len(residuals) > 1]
    return [group for group in groups if _readable(group)]


def _readable(group: Group) -> bool:
    first, last = group.first.node, group.residuals[-1].node
    weights = [item for one in group.residuals for item in (one.query, one.norm_weight) if item is not None]
    written = written_between(first, last)
    unwritten = not any(storage_root(item) in written for item in (*group.first.blocks, *weights))
    return unwritten and all(item < first or _parameter(item) is not None for item in weights)


def _parameter(weight: Node) -> Node | None:
    """The placeholder of which a weight is a view of the same elements in the same order."""
    base, chain = peel(weight, casts="none")
    place = layout(base, chain)
    flat = place is not None and place.offset == 0 and contiguous(place.shape) == place
    return base if base.op == "placeholder" and flat and shape(base)[-1:] == shape(weight)[-1:] else None


def _decide(group: Group, device: Device, phases: str) -> tuple[bool, str]:
    """Whether to split, and why in words."""
    one = serial_seconds((work_of(item.node) for item in group.residuals), device) * 1e6
    two = serial_seconds(_phase_works(group), device) * 1e6
    chosen = two < WORTH * one if phases == "auto" else phases == "two"
    blocks = len(group.first.blocks)
    what = f"{len(group.residuals)} sublayers over {blocks} finished block{'s' if blocks > 1 else ''}"
    figures = f"two phases {two:.2f} us, one pass each {one:.2f} us on {device.name}"
    return chosen, f"{what} are mixed in {'two phases' if chosen else 'one pass each'}: {figures}"


def _phase_works(group: Group) -> list[Work]:
    """The work of both phases, by the operators' own counts."""
    history, merge = OPERATORS["attention_residual_history"], OPERATORS["attention_residual_merge"]
    blocks = [_value(node) for node in group.first.blocks]
    works: list[Work] = []
    for batch in group.batches():
        queries, norms = _weights(batch)
        works.append(_work(history.cost(blocks, [_value(item) for item in queries], [_value(item) for item in norms])))
    mixture = torch.empty(blocks[0].shape, dtype=torch.float32, device="meta")
    for one in group.residuals:
        weights = [None if item is None else _value(item) for item in (one.query, one.norm_weight, one.out_norm_weight)]
        works.append(_work(merge.cost(mixture, mixture[..., 0], _value(one.partial), *weights)))
    return works


def _value(node: Node) -> torch.Tensor:
    return node.meta["val"]


def _work(cost: Cost) -> Work:
    return Work(cost.bytes, {"float32": cost.flops}, 1)


def _weights(batch: Sequence[Residual]) -> tuple[list[Node], list[Node]]:
    """Queries and norm weights of some residuals."""
    return [one.query for one in batch], [one.norm_weight for one in batch if one.norm_weight is not None]


def _split(graph: Graph, group: Group) -> Mapping[str, Node]:
    """Phase one before the first residual of each batch, phase two in place of each residual."""
    merges: dict[str, Node] = {}
    for batch in group.batches():
        place = batch[0].node
        queries, norms = ([_brought(graph, item, place) for item in items] for items in _weights(batch))
        history = call(
            graph,
            OPERATORS["attention_residual_history"].overload,
            (list(batch[0].blocks), queries, norms),
            {"eps": place.kwargs["eps"]},
            like=place,
            before=place,
        )
        whole = [call(graph, operator.getitem, (history, item), like=history, before=place) for item in (0, 1)]
        for number, one in enumerate(batch):
            merges[one.node.name] = _merged(graph, one, [(item, number) for item in whole])
    return merges


def _brought(graph: Graph, weight: Node, place: Node) -> Node:
    """A weight that can be read at ``place``: itself, or its parameter viewed there once more."""
    if weight < place:
        return weight
    parameter = _parameter(weight)
    assert parameter is not None
    if shape(parameter) == shape(weight):
        return parameter
    return call(graph, ATEN.view.default, (parameter, list(shape(weight))), like=weight, before=place)


def _merged(graph: Graph, one: Residual, history: Sequence[tuple[Node, int]]) -> Node:
    own = [
        call(graph, ATEN.select.int, (whole, 0, number), like=one.node, before=one.node) for whole, number in history
    ]
    node = call(
        graph,
        OPERATORS["attention_residual_merge"].overload,
        (*own, one.partial, one.query, one.norm_weight, one.out_norm_weight),
        dict(one.node.kwargs),
        like=one.node,
        before=one.node,
    )
    node.meta["replaces"] = one.node.meta.get("replaces", ())
    replace(one.node, node)
    graph.erase_node(one.node)
    return node
