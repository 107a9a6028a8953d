"""The new tensors of a step: who makes each, who uses it, through views and writes in place, and for how long.

Weights, caches, states and what the step returns are not among them: they lie where the caller has them, or leave.
"""

import operator
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import Graph, Node

from kimigraph.ir.dependences import starts_work
from kimigraph.ir.purity import mutated_arguments, storage_root
from kimigraph.ir.schemas import is_plain_function
from kimigraph.ir.stream_order import StreamOrder

EXTENDED = 16
"""With several streams, so many of the largest sets in use are looked at for what may run beside."""


@dataclass(eq=False)
class NewTensor:
    """A tensor that a step makes for itself.

    ``maker`` is the call that makes it and ``index`` its place among several results (None: the only one). ``names``
    are the nodes that stand for it, ``uses`` the work that touches its bytes, ``maker`` first. ``nbytes`` is the reach
    of its elements. ``kept`` says why it cannot lie in memory that the step uses again, empty where it can.
    """

    maker: Node
    index: int | None
    value: torch.Tensor
    nbytes: int
    names: list[Node] = field(default_factory=lambda: [])
    uses: list[Node] = field(default_factory=lambda: [])
    kept: str = ""

    @property
    def name(self) -> str:
        """For people: the node, or the call and the number of the result."""
        return self.maker.name if self.index is None else f"{self.maker.name}[{self.index}]"


def new_tensors(graph: Graph) -> list[NewTensor]:
    """All new tensors of a step, in the order of their makers."""
    roots = _Roots(graph)
    found: dict[tuple[Node, int | None], NewTensor] = {}
    for node in graph.nodes:
        if starts_work(node):
            found |= {(node, index): tensor for index, tensor in _made_by(node, roots)}
        elif node.target is operator.getitem and (key := _item(node)) in found:
            if roots.of(node) is node:
                found[key].names.append(node)
            else:  # a result that is an argument's storage
                del found[key]
    by_root = {name: tensor for tensor in found.values() for name in tensor.names}
    for node in graph.nodes:
        reason = _keeps(node)
        if not reason and not starts_work(node):
            continue
        for root in dict.fromkeys(roots.of(argument) for argument in node.all_input_nodes):
            if root not in by_root:
                continue
            if reason:
                by_root[root].kept = reason
            elif node not in by_root[root].uses:
                by_root[root].uses.append(node)
    return list(found.values())


class Lifetimes:
    """When the new tensors of a graph are in use, under the order of its streams."""

    def __init__(self, graph: Graph) -> None:
        self.tensors = [tensor for tensor in new_tensors(graph) if not tensor.kept]
        self.order = StreamOrder(graph)
        self._in_use = [self._mask(tensor) for tensor in self.tensors]
        self._span = [self._positions(tensor) for tensor in self.tensors]
        self._several = self.order.streams > 1

    def may_share(self, first: int, second: int) -> bool:
        """Whether all use of one of two tensors (by number) has ended when the other is made."""
        if self._span[first][1] < self._span[second][0]:
            return not self._several or self._ended(first, second)
        if self._span[second][1] < self._span[first][0]:
            return not self._several or self._ended(second, first)
        return False

    def lower_bound(self, sizes: list[int]) -> int:
        """No plan has a smaller peak: the largest sum found of sizes of tensors of which no two may share bytes.

        Those are the tensors in use while one node runs and, with several streams, what may run beside it.
        """
        in_use: list[list[int]] = [[] for _ in self.order.work]
        for number, tensor in enumerate(self.tensors):
            until = 0
            for node in tensor.uses:
                until |= self.order.until(node)
            for position in _bits(self.order.since(tensor.maker) & until):
                in_use[position].append(number)

        def total(numbers: list[int]) -> int:
            return sum(sizes[number] for number in numbers)

        in_use.sort(key=total, reverse=True)
        if self._several:
            in_use = [self._with_others(group, sizes) for group in in_use[:EXTENDED]]
        return max(map(total, in_use), default=0)

    def _with_others(self, group: list[int], sizes: list[int]) -> list[int]:
        """``group`` and, large ones first, every tensor that may share bytes with none in it."""
        found = list(group)
        for number in sorted(range(len(sizes)), key=lambda number: -sizes[number]):
            if number not in found and not any(self.may_share(number, other) for other in found):
                found.append(number)
        return found

    def span(self, number: int) -> tuple[Node, Node]:
        """The first and the last node, in the order of the graph, that touch a tensor."""
        first, last = self._span[number]
        return self.order.work[first], self.order.work[last]

    def _ended(self, first: int, second: int) -> bool:
        return not self._in_use[first] & ~self.order.before(self.tensors[second].maker)

    def _mask(self, tensor: NewTensor) -> int:
        mask = 0
        for node in tensor.uses:
            mask |= self.order.bit(node)
        return mask

    def _positions(self, tensor: NewTensor) -> tuple[int, int]:
        places = [self.order.position[node] for node in tensor.uses]
        return min(places), max(places)


class _Roots:
    """The node that owns the bytes of each node; one that copies, this time, where it might give a view owns its own.

    ``starts_work`` tells: shapes and strides are static, so what copies here copies when the program runs.
    """

    def __init__(self, graph: Graph) -> None:
        self._known: dict[Node, Node] = {}
        for node in graph.nodes:
            if node.op == "call_function" and starts_work(node) and not mutated_arguments(node):
                if isinstance(node.meta.get("val"), torch.Tensor):
                    self._known[node] = node

    def of(self, node: Node) -> Node:
        return storage_root(node, self._known)


def _made_by(node: Node, roots: _Roots) -> Iterator[tuple[int | None, NewTensor]]:
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        if roots.of(node) is node and (nbytes := reach(value)):
            yield None, NewTensor(node, None, value, nbytes, [node], [node])
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            if isinstance(item, torch.Tensor) and (nbytes := reach(item)):
                yield index, NewTensor(node, index, item, nbytes, [], [node])


def reach(value: torch.Tensor) -> int | None:
    """Bytes from the first element of a tensor to behind its last; None for no elements, or sizes known at run time."""
    sizes: tuple[Any, ...] = (*value.shape, *value.stride())
    if any(isinstance(size, torch.SymInt) for size in sizes) or 0 in value.shape:
        return None
    last = sum((size - 1) * step for size, step in zip(value.shape, value.stride(), strict=True))
    return (last + 1) * value.element_size()


def _item(node: Node) -> tuple[Node, int | None]:
    container, index = node.args
    assert isinstance(container, Node)
    return container, index if isinstance(index, int) else None


def _keeps(node: Node) -> str:
    """Why the arguments of a node cannot lie in memory that the step uses again; empty where they can."""
    if node.op == "output":
        return "the step returns it"
    unknown = node.op == "call_method" or (
        node.op == "call_function" and not isinstance(node.target, OpOverload) and not is_plain_function(node.target)
    )
    return f"{node.name} is no operator with a schema, and may keep it" if unknown else ""


def _bits(mask: int) -> Iterator[int]:
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low
