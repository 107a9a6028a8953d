"""Carries shares of weights and states through a graph, and puts collectives where a whole value is needed."""

from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import Graph, Node

from kimigraph.ir.errors import CompileError
from kimigraph.ir.fake import infer
from kimigraph.ir.mesh import COLLECTIVES, TP_GROUP
from kimigraph.ir.purity import mutated_arguments
from kimigraph.ir.shares import Share
from kimigraph.passes.algebra.nodes import described as target_of
from kimigraph.passes.algebra.rewrite import call
from kimigraph.passes.sharding.operators import OPERATOR_RULES
from kimigraph.passes.sharding.placement import (
    PARTIAL,
    REPLICATED,
    NotCarried,
    Placement,
    Placements,
    described,
    local_shape,
)
from kimigraph.passes.sharding.rules import RULES, TAKES_PARTIAL, pointwise

import_module("torch.distributed._functional_collectives")  # registers the fake forms of collectives
ATEN = torch.ops.aten
C10D: Any = getattr(torch.ops, COLLECTIVES)


@dataclass
class Spread:
    """One walk over a graph of which the placeholders are placed; ``ways`` ranks.

    ``whole`` are the values that nodes had before, by which rules tell dims apart.
    """

    graph: Graph
    ways: int
    placed: dict[Node, Placements]
    whole: dict[Node, Any]
    gathered: dict[Node, Node] = field(default_factory=lambda: {})
    reduced: dict[Node, Node] = field(default_factory=lambda: {})
    notes: list[tuple[Node, str]] = field(default_factory=lambda: [])

    def run(self) -> None:
        """Place every node. CompileError for a state that would have to be gathered to be written."""
        for node in list(self.graph.nodes):
            if node.op == "placeholder":
                continue
            if node.op == "output":
                for argument in node.all_input_nodes:
                    self._give_whole(node, argument)
            else:
                self._place(node)

    def of(self, value: Any) -> Placement:
        """Where an argument lies; what is no node is the same everywhere."""
        placed = self.placed.get(value, REPLICATED) if isinstance(value, Node) else REPLICATED
        return REPLICATED if isinstance(placed, tuple) and not isinstance(placed, Share) else placed

    def share(self, value: Any) -> Share | None:
        """The share of an argument, None where it has none."""
        placed = self.of(value)
        return placed if isinstance(placed, Share) else None

    def shape(self, node: Node) -> tuple[int, ...]:
        """The shape of the whole value of a node."""
        return tuple(self.whole[node].shape)

    def _place(self, node: Node) -> None:
        name = node.target.overloadpacket.__name__ if isinstance(node.target, OpOverload) else target_of(node)
        if name not in TAKES_PARTIAL:
            for argument in node.all_input_nodes:
                if self.of(argument) is PARTIAL:
                    node.replace_input_with(argument, self._sum(node, argument))
        for argument in node.all_input_nodes:
            if argument.target is ATEN.embedding.default:  # its rows are gathered by plan
                self._give_whole(node, argument)
        inputs = [self.placed.get(argument, REPLICATED) for argument in node.all_input_nodes]
        if all(placed is REPLICATED for placed in inputs):
            self.placed[node] = REPLICATED
            return
        try:
            self.placed[node] = self._carried(node, name)
        except NotCarried as refusal:
            self._work_on_wholes(node, refusal.reason)
        self._check(node)

    def _carried(self, node: Node, name: str) -> Placements:
        rule = OPERATOR_RULES.get(name) or RULES.get(name)
        if rule is None and isinstance(node.target, OpOverload) and torch.Tag.pointwise in node.target.tags:
            rule = pointwise
        if rule is None:
            raise NotCarried(f"{target_of(node)} is not known to work on shares")
        return rule(self, node)

    def _work_on_wholes(self, node: Node, reason: str) -> None:
        written = [item for item in mutated_arguments(node) if self.of(item) is not REPLICATED]
        if written:
            raise CompileError(
                f"shard: node {node.name} ({target_of(node)}) writes {written[0].name}, of which each rank has a share "
                f"({described(self.of(written[0]))}), and cannot work on it: {reason}. Use tp 1, or leave out what "
                "makes this node"
            )
        before = len(self.gathered)
        for argument in node.all_input_nodes:
            self._give_whole(node, argument)
        self.placed[node] = REPLICATED
        if len(self.gathered) > before:
            self.notes.append((node, reason))

    def _check(self, node: Node) -> None:
        """Infer the node's value anew; a rank must have what the placement says."""
        infer(node)
        placed, whole = self.placed[node], self.whole[node]
        pairs = (
            zip(placed, whole, strict=True)
            if isinstance(placed, tuple) and not isinstance(placed, Share)
            else [(placed, whole)]
        )
        values = node.meta["val"] if isinstance(node.meta["val"], list | tuple) else [node.meta["val"]]
        for (place, before), value in zip(pairs, values, strict=False):
            if isinstance(before, torch.Tensor) and tuple(value.shape) != local_shape(tuple(before.shape), place):
                raise CompileError(
                    f"shard: node {node.name} ({target_of(node)}) gives each rank {list(value.shape)} of "
                    f"{list(before.shape)}, placed {described(place)}: report the model, or use tp 1"
                )

    def _give_whole(self, node: Node, argument: Node) -> None:
        placed = self.of(argument)
        if placed is PARTIAL:
            node.replace_input_with(argument, self._sum(node, argument))
        elif isinstance(placed, Share):
            node.replace_input_with(argument, self._gather(node, argument, placed))

    def _sum(self, user: Node, partial: Node) -> Node:
        """The sum of the ranks' addends, before its first user."""
        if partial not in self.reduced:
            pending = call(self.graph, C10D.all_reduce.default, (partial, "sum", TP_GROUP), like=partial, before=user)
            self.reduced[partial] = self._waited(pending, partial, user)
        return self.reduced[partial]

    def _gather(self, user: Node, part: Node, share: Share) -> Node:
        """The whole of what ranks have shares of: they come one behind the other, and go where they belong."""
        if part in self.gathered:
            return self.gathered[part]
        local = list(part.meta["val"].shape)
        source = call(
            self.graph,
            ATEN.clone.default,
            (part,),
            {"memory_format": torch.contiguous_format},
            like=part,
            before=user,
        )
        pending = call(
            self.graph, C10D.all_gather_into_tensor.default, (source, self.ways, TP_GROUP), like=part, before=user
        )
        node = self._waited(pending, part, user, keep=False)
        node = self._in_place(node, local, share, part, user)
        self.placed[node], self.whole[node] = REPLICATED, self.whole[part]
        self.gathered[part] = node
        return node

    def _in_place(self, node: Node, local: list[int], share: Share, part: Node, user: Node) -> Node:
        """What came one behind the other, each where it belongs."""
        if share.dim > 0 and share.blocks == 1:  # one copy of long runs
            spans = [(local[0] * rank, local[0] * (rank + 1)) for rank in range(self.ways)]
            pieces = [
                call(self.graph, ATEN.slice.Tensor, (node, 0, begin, end), like=part, before=user)
                for begin, end in spans
            ]
            return call(self.graph, ATEN.cat.default, (pieces, share.dim), like=part, before=user)
        piece = [*local[: share.dim], share.blocks, local[share.dim] // share.blocks, *local[share.dim + 1 :]]
        node = call(self.graph, ATEN.view.default, (node, [self.ways, *piece]), like=part, before=user)
        order = [*range(1, share.dim + 2), 0, *range(share.dim + 2, len(piece) + 1)]
        if order != list(range(len(order))):
            node = call(self.graph, ATEN.permute.default, (node, order), like=part, before=user)
        return call(self.graph, ATEN.reshape.default, (node, list(share.whole(local))), like=part, before=user)

    def _waited(self, pending: Node, like: Node, user: Node, keep: bool = True) -> Node:
        node = call(self.graph, C10D.wait_tensor.default, (pending,), like=like, before=user)
        if keep:
            self.placed[node], self.whole[node] = REPLICATED, self.whole[like]
        return node
