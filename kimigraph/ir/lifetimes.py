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

from kimigraph.ir.collectives import reads_until_wait
from kimigraph.ir.dependences import starts_work
from kimigraph.ir.launch_memory import outside, scratch_of
from kimigraph.ir.overlap import heaviest_set
from kimigraph.ir.purity import mutated_arguments, storage_root
from kimigraph.ir.schemas import is_plain_function
from kimigraph.ir.stream_order import StreamOrder

SWEEP = 16
"""After so many tensors, those that are done for good are set aside."""

EXTENDED = 16
"""With several streams, so many of the largest sets in use are looked at for what may run beside."""


@dataclass(eq=False)
class NewTensor:
    """A tensor that a step makes for itself.

    ``maker`` is the call that makes it and ``index`` its place among several results (None: the only one; below 0:
    scratch of the call). ``names`` are the nodes that stand for it, ``uses`` the work that touches its bytes, ``maker``
    first. ``nbytes`` is the reach of its elements. ``kept`` says why it cannot lie in memory that the step uses again,
    empty where it can.
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
        if self.index is None:
            return self.maker.name
        return f"{self.maker.name}[{self.index}]" if self.index >= 0 else f"{self.maker.name} scratch {~self.index}"


def new_tensors(graph: Graph) -> list[NewTensor]:
    """All new tensors of a step, and the scratch of its calls, in the order of their makers."""
    roots = _Roots(graph)
    found: dict[tuple[Node, int | None], NewTensor] = {}
    for node in graph.nodes:
        if starts_work(node):
            found |= {(node, index): tensor for index, tensor in _made_by(node, roots)}
            found |= {(node, tensor.index): tensor for tensor in _scratch(node)}
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
    for tensor in found.values():
        if tensor.index is None or tensor.index >= 0:
            tensor.kept = tensor.kept or outside(tensor.maker, tensor.index or 0)
    return list(found.values())


class Lifetimes:
    """When the new tensors of a graph are in use, under the order of its streams.

    ``kept`` are those that lie outside an arena. ``conflicts`` has for each other tensor, by number, those that may not
    share bytes with it: two may when all use of one has ended before the other is made.
    """

    def __init__(self, graph: Graph) -> None:
        made = new_tensors(graph)
        self.tensors = [tensor for tensor in made if not tensor.kept]
        self.kept = [tensor for tensor in made if tensor.kept]
        self.order = StreamOrder(graph)
        self._in_use = [self._mask(tensor) for tensor in self.tensors]
        self.conflicts = self._conflicts()

    def _conflicts(self) -> list[list[int]]:
        """Tensors come in the order of their makers, so one is held against those before it that are not done for good.

        That is when all streams that go on have come behind their ends.
        """
        found: list[list[int]] = [[] for _ in self.tensors]
        active: list[int] = []
        for number, tensor in enumerate(self.tensors):
            open_ = ~self.order.before(tensor.maker)
            for other in active:
                if self._in_use[other] & open_:
                    found[number].append(other)
                    found[other].append(number)
            if number % SWEEP == 0:
                done = self.order.done_everywhere(tensor.maker)
                active = [other for other in active if self._in_use[other] & ~done]
            active.append(number)
        return found

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

        if self.order.streams == 1:
            return max(map(total, in_use), default=0)
        in_use.sort(key=total, reverse=True)
        return heaviest_set(sizes, self.conflicts, in_use[:EXTENDED])

    def span(self, number: int) -> tuple[Node, Node]:
        """The first and the last node, in the order of the graph, that touch a tensor."""
        places = [self.order.position[node] for node in self.tensors[number].uses]
        return self.order.work[min(places)], self.order.work[max(places)]

    def _mask(self, tensor: NewTensor) -> int:
        mask = 0
        for node in tensor.uses:
            mask |= self.order.bit(node)
        return mask


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


def _scratch(node: Node) -> Iterator[NewTensor]:
    for number, item in enumerate(scratch_of(node)):
        value = torch.empty(item.nbytes, dtype=torch.uint8, device="meta")
        yield NewTensor(node, ~number, value, item.nbytes, [], [node])


def reach(value: torch.Tensor) -> int | None:
    """Bytes from the first element of a tensor to behind its last; None for no elements, or sizes known at run time."""
    shape: tuple[Any, ...] = tuple(value.shape)
    stride: tuple[Any, ...] = value.stride()
    if any(isinstance(size, torch.SymInt) for size in (*shape, *stride)) or 0 in shape:
        return None
    last = sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
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
    if reads_until_wait(node):
        return f"{node.name} reads it while other work goes on, until its wait"
    return f"{node.name} is no operator with a schema, and may keep it" if unknown else ""


def _bits(mask: int) -> Iterator[int]:
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low
