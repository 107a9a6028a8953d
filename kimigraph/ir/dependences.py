"""Which node must run before which: by data, and by the order of reads and writes of one storage.

``Dependences`` answers for all nodes of a graph, views included, and for merging; ``work_dependences`` gives the edges
between the nodes that start work on a device, which is what a schedule has to keep.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Literal

from torch.fx import Graph, Node

from kimigraph.ir.launches import launches_of
from kimigraph.ir.operators import operator_of
from kimigraph.ir.purity import has_effect, is_pure, mutated_arguments, region_module, storage_root

Kind = Literal[
    "operand", "read after write", "write after read", "write after write", "order of effects", "one at a time"
]

ONE_AT_A_TIME = frozenset(("lightning_indexer", "sparse_attention", "latent_attention"))
"""Operators whose kernels keep counters from launch to launch, and whose programs wait for one another: they may run
beside others, never beside one another."""


@dataclass(frozen=True)
class Dependence:
    """``second`` must run after ``first``. ``storage`` is the node whose storage both use, where that is the reason."""

    first: Node
    second: Node
    kind: Kind
    storage: Node | None = None


class Dependences:
    """What every node of a graph waits for, directly or through others. Sets of nodes are bits of integers.

    A node waits for its arguments; a reader for the last write of the storage that it reads; a write for the last
    write and for all reads since; and whatever else has an effect (random numbers, assertions, collectives) for the one
    before.

    ``merge`` records that nodes become one; later questions are about the graph with all recorded merges done. It
    changes nothing in the graph itself.
    """

    def __init__(self, graph: Graph) -> None:
        self._bit: dict[Node, int] = {}
        self._before: dict[Node, int] = {}
        self._find(graph.nodes)

    @classmethod
    def between(cls, first: Node, last: Node) -> "Dependences":
        """The same for the nodes from ``first`` to ``last`` alone: what waits for what among them shows in them."""
        nodes, node = [first], first
        while node is not last:
            node = node.next
            nodes.append(node)
        made = cls(Graph())
        made._find(nodes)
        return made

    def _find(self, nodes: Iterable[Node]) -> None:
        self._bit = {node: 1 << index for index, node in enumerate(nodes)}
        storages = _Storages()
        for node in self._bit:
            waits = 0
            for found in storages.dependences(node):
                if found.first in self._bit:
                    waits |= self._before[found.first] | self._bit[found.first]
            self._before[node] = waits

    def precedes(self, first: Node, second: Node) -> bool:
        """Whether ``second`` waits for ``first``."""
        return bool(self._before[second] & self._bit[first])

    def path(self, nodes: Collection[Node]) -> tuple[Node, Node] | None:
        """Two of ``nodes`` of which the second waits for the first, or None: then they may become one node."""
        mask = self._mask(nodes)
        for node in nodes:
            found = self._before[node] & mask & ~self._bit[node]
            if found:
                return next(other for other in nodes if self._bit[other] & found), node
        return None

    def merge(self, nodes: Collection[Node]) -> None:
        """Make ``nodes``, between which there is no path, one: what waits for one of them waits for all."""
        mask, before = self._mask(nodes), 0
        for node in nodes:
            before |= self._before[node]
        for node, waits in self._before.items():
            if waits & mask:
                self._before[node] = waits | mask | before
        for node in nodes:
            self._before[node] = before

    def _mask(self, nodes: Collection[Node]) -> int:
        return sum(self._bit[node] for node in set(nodes))


def node_dependences(nodes: Iterable[Node]) -> dict[Node, list[Dependence]]:
    """The direct dependences of every node of ``nodes``, which are in graph order; views count as readers."""
    storages = _Storages()
    return {node: storages.dependences(node) for node in nodes}


def starts_work(node: Node) -> bool:
    """Whether the node puts work on a device at each step: no view, no placeholder, no weight prepared beforehand."""
    return launches_of(node) > 0


def holds_operator(node: Node, names: Collection[str]) -> bool:
    """Whether the node is one of the semantic operators ``names``, or a region with one."""
    child = region_module(node) if node.op == "call_module" else None
    if child is not None:
        return any(holds_operator(inner, names) for inner in child.graph.nodes)
    operator = operator_of(node)
    return operator is not None and operator.name in names


def is_one_at_a_time(node: Node) -> bool:
    """Whether the node is one of ``ONE_AT_A_TIME``, or a region with one."""
    return holds_operator(node, ONE_AT_A_TIME)


def work_dependences(graph: Graph) -> dict[Node, list[Dependence]]:
    """The direct dependences between nodes that start work, for each of them in graph order.

    What lies between two of them (views, items of several results) is looked through. At most one dependence is given
    for a pair, a data dependence first. An operator that may return a view of its argument counts as one here, even if
    it copies this time: the order that this asks for is never less than what is needed. Kernels that must not run at
    once (``ONE_AT_A_TIME``) are a chain.
    """
    storages = _Storages()
    makers: dict[Node, tuple[Node, ...]] = {}
    found: dict[Node, list[Dependence]] = {}
    alone: list[Node] = []
    for node in graph.nodes:
        if not starts_work(node):
            bound = node.op == "placeholder" or node.meta.get("prepared")
            makers[node] = () if bound else _union(makers[argument] for argument in node.all_input_nodes)
            continue
        makers[node] = (node,)
        items = storages.dependences(node)
        if is_one_at_a_time(node):
            items += [Dependence(other, node, "one at a time") for other in alone[-1:]]
            alone.append(node)
        found[node] = _through(items, makers)
    return found


def _through(dependences: Iterable[Dependence], makers: dict[Node, tuple[Node, ...]]) -> list[Dependence]:
    """The same with operands replaced by what made them; one for each node waited for."""
    kept: dict[Node, Dependence] = {}
    for item in dependences:
        if item.kind != "operand":
            kept.setdefault(item.first, item)
            continue
        for maker in makers[item.first]:
            kept.setdefault(maker, Dependence(maker, item.second, "operand", item.storage))
    return list(kept.values())


def _union(groups: Iterable[tuple[Node, ...]]) -> tuple[Node, ...]:
    return tuple(dict.fromkeys(node for group in groups for node in group))


class _Storages:
    """The last write and the reads since, by storage; a walk over the graph in order."""

    def __init__(self) -> None:
        self._known: dict[Node, Node] = {}
        self._written: dict[Node, Node] = {}
        self._read: dict[Node, list[Node]] = {}
        self._effect: Node | None = None

    def dependences(self, node: Node) -> list[Dependence]:
        """What ``node`` waits for among the nodes asked about so far, and its operands."""
        roots = {argument: storage_root(argument, self._known) for argument in node.all_input_nodes}
        found = [Dependence(argument, node, "operand", root) for argument, root in roots.items()]
        written = dict.fromkeys(storage_root(argument, self._known) for argument in mutated_arguments(node))
        for root in dict.fromkeys((*roots.values(), *written)):
            if root in self._written:
                kind: Kind = "write after write" if root in written else "read after write"
                found.append(Dependence(self._written[root], node, kind, root))
            if root in written:
                found += [Dependence(other, node, "write after read", root) for other in self._read.get(root, ())]
                self._written[root], self._read[root] = node, []
            else:
                self._read.setdefault(root, []).append(node)
        if _keeps_order(node, bool(written)):
            if self._effect is not None:
                found.append(Dependence(self._effect, node, "order of effects"))
            self._effect = node
        return found


def _keeps_order(node: Node, writes: bool) -> bool:
    """Whether the node takes its turn among random numbers, assertions, collectives and what is not known."""
    if node.op in ("placeholder", "output"):
        return False
    return has_effect(node) or (not writes and not is_pure(node))
