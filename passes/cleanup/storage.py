"""Who writes which storage, and what of it leaves the graph: taken once, asked many times."""

from bisect import bisect_right
from dataclasses import dataclass

from torch.fx import Graph, Node

from kimigraph.ir.purity import mutated_arguments, storage_root


@dataclass(frozen=True)
class StorageFacts:
    """Where nodes stand, where each storage is written, which nodes are outputs and whose storage is an output's."""

    position: dict[Node, int]
    writes: dict[Node, list[int]]
    outputs: set[Node]
    escaping: set[Node]

    @classmethod
    def of(cls, graph: Graph) -> "StorageFacts":
        """The facts of ``graph`` as it is now; they hold while only pure nodes are merged or taken out."""
        position = {node: index for index, node in enumerate(graph.nodes)}
        writes: dict[Node, list[int]] = {}
        known: dict[Node, Node] = {}
        for node in graph.nodes:
            for written in mutated_arguments(node):
                writes.setdefault(storage_root(written, known), []).append(position[node])
        outputs = {source for node in graph.nodes if node.op == "output" for source in node.all_input_nodes}
        return cls(position, writes, outputs, {storage_root(node, known) for node in outputs})

    def written_after(self, value: Node, node: Node) -> bool:
        """Whether the storage of ``value`` is written at any place behind ``node``."""
        positions = self.writes.get(storage_root(value), [])
        return bisect_right(positions, self.position[node]) < len(positions)

    def written_between(self, value: Node, first: Node, last: Node) -> bool:
        """Whether the storage of ``value`` is written behind ``first`` and before ``last``."""
        positions = self.writes.get(storage_root(value), [])
        index = bisect_right(positions, self.position[first])
        return index < len(positions) and positions[index] < self.position[last]

    def escapes(self, value: Node) -> bool:
        """Whether the storage of ``value`` is that of an output."""
        return storage_root(value) in self.escaping

    def replace(self, node: Node, other: Node) -> None:
        """Note that ``other`` stands for ``node`` from now on, in the outputs too."""
        if node in self.outputs:
            self.outputs.add(other)
        if self.escapes(node):
            self.escaping.add(storage_root(other))
