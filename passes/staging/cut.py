"""Where each value of a step is computed when its layers are shared out among stages, and what has to cross.

A value is *fixed* to the highest stage among what it is made of: weights, caches and states of a layer, and other fixed
values. What is made of the caller's inputs alone (positions, masks), or of weights alone, is *free*: each stage that
needs it computes it. So is a fixed value that is only rearranged (stacked, viewed, widened), wherever what it is made
of is no larger: finished blocks then cross one by one, each once, and not as part of every stack that holds them. And
what is light work on values that cross anyway, such as the scale of a norm, is done behind the boundary.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, Node

from kimigraph.ir.errors import CompileError
from kimigraph.ir.launches import is_view
from kimigraph.ir.purity import is_pure, mutated_arguments, storage_root

ATEN = torch.ops.aten
_REARRANGE = frozenset(
    getattr(ATEN, name)
    for name in (
        *("stack", "cat", "view", "_unsafe_view", "reshape", "expand", "permute", "transpose", "unsqueeze", "squeeze"),
        *("clone", "_to_copy", "alias", "detach", "repeat_interleave"),
    )
)


_REDUCE = frozenset((ATEN.mean, ATEN.sum, ATEN.amax))
MOST_LIGHT = 24
"""Nodes of light work that a stage does again at most, so that their result need not cross."""


@dataclass(frozen=True)
class Need:
    """What a stage computes or takes as inputs, and what arrives for it."""

    kept: set[Node]
    arriving: set[Node]


@dataclass(frozen=True)
class Origin:
    """What a value is made of: the highest stage, and whether weights and caller's tensors are among it."""

    stage: int = 0
    weights: bool = False
    data: bool = False
    fixed: bool = False

    def joined(self, other: "Origin") -> "Origin":
        """What is made of both."""
        return Origin(
            max(self.stage, other.stage),
            self.weights or other.weights,
            self.data or other.data,
            self.fixed or other.fixed,
        )


@dataclass
class Cut:
    """The cut of a graph of which ``origins`` has the placeholders, by those of a cache or state (``held``)."""

    graph: Graph
    stages: int
    origins: dict[Node, Origin]
    held: frozenset[Node]
    _roots: dict[Node, Node] = field(default_factory=lambda: {})
    _buffers: dict[Node, Origin] = field(default_factory=lambda: {})

    def __post_init__(self) -> None:
        """Tensors that the step makes and then writes are of one stage, the last that writes them."""
        written = {storage_root(item, self._roots) for node in self.graph.nodes for item in mutated_arguments(node)}
        self._buffers = {root: Origin(fixed=True) for root in written if root.op != "placeholder"}
        before = None
        while before != self._buffers:
            before = dict(self._buffers)
            for node in self.graph.nodes:
                if node.op != "placeholder":
                    self.origins[node] = self._origin(node)

    def needs(self) -> list[Need]:
        """What each stage computes, and what must cross to it."""
        found: list[Need] = []
        later: set[Node] = set()
        for stage in reversed(range(self.stages)):
            need = self._need(stage, later)
            found.append(need)
            later |= need.arriving
        return found[::-1]

    def _need(self, stage: int, later: set[Node]) -> Need:
        """Of a stage, of which later ones need ``later``: its writes, and what they and later ones are made of."""
        ends = {node for node in self.graph.nodes if self._is_here(node, stage) and not is_pure(node)}
        ends |= {node for node in later if self.origins[node].stage == stage}
        need = self._reached(stage, ends, frozenset())
        known = need.arriving | {node for node in later if self.origins[node].stage < stage}
        again: set[Node] = set()
        for node in [node for node in self.graph.nodes if node in need.arriving]:
            light, made_of = self._light_work(node, known - again - {node})
            if made_of <= known or sum(map(_bytes, made_of)) < _bytes(node):
                again |= light
                known |= made_of
        return self._reached(stage, ends, again)

    def _reached(self, stage: int, ends: set[Node], again: Collection[Node]) -> Need:
        """``ends`` and what they are made of, down to what arrives; values of ``again`` are computed once more."""
        kept, arriving = {*ends}, set[Node]()
        waiting = [argument for node in ends for argument in node.all_input_nodes]
        while waiting:
            node = waiting.pop()
            if node in kept or node in arriving:
                continue
            here = self.origins[node].stage == stage or not self.origins[node].fixed
            if node.op == "placeholder":
                self._require_here(node, stage)
                kept.add(node)
            elif here or node in again or self._is_rearranged(node):
                kept.add(node)
                waiting += node.all_input_nodes
            else:
                self._require_own_memory(node, stage)
                arriving.add(node)
        return Need(kept, arriving)

    def _light_work(self, node: Node, known: set[Node]) -> tuple[set[Node], set[Node]]:
        """Light work that makes a value, such as the scale of a norm or a mask, and the values that it is made of:
        those that are ``known``, and others that are no light work. The value itself where it is none."""
        waiting, light, made_of = [node], set[Node](), set[Node]()
        while waiting:
            item = waiting.pop()
            if item in light or not self.origins[item].fixed:
                continue
            if item in known or not self._is_light(item) or len(light) > MOST_LIGHT:
                made_of.add(item)
                continue
            light.add(item)
            waiting += item.all_input_nodes
        return light, made_of

    def _is_light(self, node: Node) -> bool:
        if node.op != "call_function" or not is_pure(node) or storage_root(node, self._roots) in self._buffers:
            return False
        if any(not self.origins[item].fixed and self.origins[item].weights for item in node.all_input_nodes):
            return False
        if any(storage_root(item, self._roots) in self.held for item in node.all_input_nodes):
            return False
        pointwise = torch.Tag.pointwise in getattr(node.target, "tags", ())
        return pointwise or is_view(node) or getattr(node.target, "overloadpacket", None) in _REARRANGE | _REDUCE

    def _origin(self, node: Node) -> Origin:
        found = Origin()
        for argument in node.all_input_nodes:
            found = found.joined(self.origins[argument])
        if node.op == "output":
            return Origin(self.stages - 1, fixed=True)
        for written in mutated_arguments(node):
            root = storage_root(written, self._roots)
            if root in self.held and self.origins[root].stage < found.stage:
                raise CompileError(
                    f"split-stages: node {node.name} writes {root.name}, which stage {self.origins[root].stage} has, "
                    f"with what stage {found.stage} computes: stages cannot share it; use fewer stages (--pp)"
                )
            if root in self._buffers:
                self._buffers[root] = self._buffers[root].joined(found)
        root = storage_root(node, self._roots)
        found = found.joined(self._buffers.get(root, found))
        fixed = found.fixed or (found.weights and found.data) or not is_pure(node)
        return Origin(found.stage, found.weights, found.data, fixed)

    def _is_here(self, node: Node, stage: int) -> bool:
        return node.op != "placeholder" and self.origins[node].fixed and self.origins[node].stage == stage

    def _is_rearranged(self, node: Node) -> bool:
        if getattr(node.target, "overloadpacket", None) not in _REARRANGE:
            return False
        return sum(map(_bytes, node.all_input_nodes)) <= _bytes(node)

    def _require_here(self, node: Node, stage: int) -> None:
        if node in self.held and self.origins[node].stage != stage:
            raise _foreign(node, node, self.origins[node].stage, stage)

    def _require_own_memory(self, node: Node, stage: int) -> None:
        root = storage_root(node, self._roots)
        if root in self.held:
            raise _foreign(node, root, self.origins[root].stage, stage)


def erase_all_but(graph: Graph, kept: Iterable[Node]) -> None:
    """Erase every node that is not among ``kept`` and that none of them uses."""
    left = {*kept}
    for node in reversed(list(graph.nodes)):
        if node not in left and node.op != "output":
            graph.erase_node(node)


def _foreign(node: Node, root: Node, owner: int, stage: int) -> CompileError:
    return CompileError(
        f"split-stages: stage {stage} reads {root.name} through {node.name}, and stage {owner} has it: caches and "
        "states do not cross; use fewer stages (--pp)"
    )


def _bytes(node: Node) -> int:
    value: Any = node.meta["val"]
    items = value if isinstance(value, list | tuple) else [value]
    return sum(item.nbytes for item in items if isinstance(item, torch.Tensor))
