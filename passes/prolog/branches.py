"""The branches of an indexer's input preparation, found in a graph.

All three begin at the layer's input. The query goes through the query latent, which the attention shares; index key and
head weights need nothing but the input, as do further products of it (the latent cache's rows, an output gate).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from torch.fx import Graph, Node

from kimigraph.ir.dependences import Dependence, Dependences, node_dependences
from kimigraph.ir.launches import launches_of
from kimigraph.ir.operators import operator_of
from kimigraph.ir.purity import is_pure, storage_root
from kimigraph.passes.algebra.nodes import argument, packet
from kimigraph.passes.algebra.refusal import Refused

QUERY, KEY, WEIGHTS = "query", "index key", "head weights"
_PRODUCTS = frozenset(("linear", "matmul", "mm", "bmm", "addmm"))


@dataclass(frozen=True)
class Prolog:
    """What stands between the layer's input ``source`` and its ``indexer``, in graph order.

    ``branches`` maps each name to the nodes that belong to it alone, ``shared`` holds cheap nodes that several take a
    value from, ``beside`` what needs two branches and feeds no indexer.
    """

    indexer: Node
    source: Node
    branches: Mapping[str, tuple[Node, ...]]
    shared: tuple[Node, ...]
    beside: tuple[Node, ...]

    @property
    def nodes(self) -> list[Node]:
        """All of it but the indexer, in graph order."""
        return sorted([node for branch in self.branches.values() for node in branch] + [*self.shared, *self.beside])

    def describe(self) -> str:
        """For a remark: the products and operators of each branch."""
        return "; ".join(f"{name}: {_listed(nodes)}" for name, nodes in self.branches.items())


class PrologFinder:
    """Finds the prologs of one graph: what waits for what is worked out once."""

    def __init__(self, graph: Graph) -> None:
        self._nodes: list[Node] = [node for node in graph.nodes if node.op != "output"]
        self._direct: dict[Node, list[Dependence]] = node_dependences(self._nodes)
        self._dependences = Dependences(graph)

    def indexers(self) -> Iterator[Node]:
        """The indexers of the graph."""
        for node in self._nodes:
            operator = operator_of(node)
            if operator is not None and operator.name == "lightning_indexer":
                yield node

    def find(self, indexer: Node) -> Prolog:
        """The prolog of an indexer. Refused, with the reason, where its three parts are no branches of one input."""
        seeds = {
            QUERY: _tensors(indexer, "q", "q_scales"),
            KEY: self._key_sources(indexer),
            WEIGHTS: _tensors(indexer, "weights"),
        }
        for name, nodes in seeds.items():
            if not nodes:
                raise Refused(f"the indexer's {name} is an input of the step: nothing prepares it", indexer)
        needed = {name: self._ancestors(nodes) for name, nodes in seeds.items()}
        source = self._source(indexer, list(needed.values()))
        inside = [node for node in self._nodes if self._between(source, node, indexer)]
        parts = {name: [node for node in inside if node in nodes] for name, nodes in needed.items()}
        shared = sorted({node for one, two in combinations(parts.values(), 2) for node in one if node in two})
        for node in shared:
            if launches_of(node) and not (
                is_pure(node) and packet(node) not in _PRODUCTS and operator_of(node) is None
            ):
                raise Refused(f"two branches of the indexer's prolog wait for {node.name}", node, 1)
        own = {name: [node for node in nodes if node not in shared] for name, nodes in parts.items()}
        beside = self._place_others(inside, own, shared)
        branches = {name: tuple(sorted(nodes)) for name, nodes in own.items()}
        for name, nodes in branches.items():
            if not any(map(launches_of, nodes)):
                raise Refused(
                    f"the indexer's {name} has no kernel of its own between the input and the indexer", indexer
                )
        return Prolog(indexer, source, branches, tuple(shared), tuple(beside))

    def _key_sources(self, indexer: Node) -> list[Node]:
        """What makes the index keys of this step: the operand if the step computes it, and writes of its storage."""
        keys: Any = argument(indexer, "keys")
        root = storage_root(keys)
        written = [item.first for item in self._direct[indexer] if item.storage is root and item.kind != "operand"]
        return [node for node in (keys, *written) if node.op != "placeholder"]

    def _ancestors(self, seeds: Sequence[Node]) -> set[Node]:
        """The nodes, and all that they wait for by data or by the order of reads and writes."""
        before = {node for node in self._nodes if any(self._dependences.precedes(node, seed) for seed in seeds)}
        return before | set(seeds)

    def _source(self, indexer: Node, needed: Sequence[set[Node]]) -> Node:
        """The last node that all three wait for."""
        common = set.intersection(*needed)
        if not common:
            raise Refused("the indexer's query, keys and weights have no common input", indexer)
        return max(common)

    def _between(self, source: Node, node: Node, indexer: Node) -> bool:
        precedes = self._dependences.precedes
        return node is not indexer and precedes(source, node) and not precedes(indexer, node)

    def _place_others(
        self, inside: Sequence[Node], own: Mapping[str, list[Node]], shared: Sequence[Node]
    ) -> list[Node]:
        """Put what feeds no indexer into the branch that it waits for; what needs the input alone goes with the
        weights. Returns what waits for several."""
        home = {node: name for name, nodes in own.items() for node in nodes}
        beside: list[Node] = []
        for node in inside:
            if node in home or node in shared:
                continue
            waited = {home[item.first] for item in self._direct[node] if item.first in home}
            if len(waited) > 1 or any(item.first in beside for item in self._direct[node]):
                beside.append(node)
                continue
            home[node] = waited.pop() if waited else WEIGHTS
            own[home[node]].append(node)
        return beside


def unshare(prolog: Prolog) -> dict[str, list[Node]]:
    """Give each branch its own copies of what several share; returns the branches with them."""
    branches = {name: list(nodes) for name, nodes in prolog.branches.items()}
    for node in reversed(prolog.shared):
        for nodes in branches.values():
            users = [user for user in nodes if user in node.users]
            if not users:
                continue
            with node.graph.inserting_before(node):
                copy = node.graph.node_copy(node)
            copy.meta = dict(node.meta)
            for user in users:
                user.replace_input_with(node, copy)
            nodes.append(copy)
    for node in reversed(prolog.shared):
        if not node.users:
            node.graph.erase_node(node)
    return branches


def _listed(nodes: Sequence[Node]) -> str:
    return ", ".join(node.name for node in nodes if packet(node) in _PRODUCTS or operator_of(node) is not None)


def _tensors(indexer: Node, *names: str) -> list[Node]:
    """The named operands that the step computes."""
    found = [argument(indexer, name) for name in names]
    return [node for node in found if isinstance(node, Node) and node.op != "placeholder"]
