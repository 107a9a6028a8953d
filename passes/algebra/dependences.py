"""Which node must run before which: by data, and by the order of reads and writes of one storage."""

from collections.abc import Collection, Iterable, Sequence

from torch.fx import Graph, Node

from kimigraph.ir.purity import is_pure, mutated_arguments, storage_root


class Dependences:
    """What every node of a graph waits for, directly or through others. Sets of nodes are bits of integers.

    A node waits for its arguments; a reader for the last write of the storage that it reads; a write for the last
    write and for all reads since; and whatever else has an effect (random numbers, assertions) for the one before.

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
            for other in storages.predecessors(node):
                if other in self._bit:
                    waits |= self._before[other] | self._bit[other]
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


def make_neighbours(nodes: Collection[Node]) -> None:
    """Move nodes so that ``nodes``, between which there is no path, stand next to each other, in their old order.

    What they wait for goes before them, the rest of what stood between them stays behind; both keep their order. Only
    what stands between them is looked at: a pass may do this once a layer.
    """
    members = sorted(set(nodes))
    place, first = members[-1], members[0]
    dependences = Dependences.between(first, place)
    between: list[Node] = []
    node = first.next
    while node is not place:
        between.append(node)
        node = node.next
    for other in between:
        if other not in members and any(dependences.precedes(other, member) for member in members):
            first.prepend(other)
    for member in reversed(members[1:]):
        first.append(member)


class _Storages:
    """The last write and the reads since, by storage; a walk over the graph in order."""

    def __init__(self) -> None:
        self._known: dict[Node, Node] = {}
        self._written: dict[Node, Node] = {}
        self._read: dict[Node, list[Node]] = {}
        self._effect: Node | None = None

    def predecessors(self, node: Node) -> Sequence[Node]:
        found: list[Node] = list(node.all_input_nodes)
        written = {storage_root(argument, self._known) for argument in mutated_arguments(node)}
        used = {storage_root(argument, self._known) for argument in node.all_input_nodes}
        for root in used | written:
            if root in self._written:
                found.append(self._written[root])
            if root in written:
                found += self._read.get(root, [])
        for root in written:
            self._written[root], self._read[root] = node, []
        for root in used - written:
            self._read.setdefault(root, []).append(node)
        if not written and node.op not in ("placeholder", "output") and not is_pure(node):
            found += [] if self._effect is None else [self._effect]
            self._effect = node
        return found
