"""A program as a list of units that keep to data and to the order of reads and writes, and that can be joined.

Every unit stands as one block, so joining two needs a look at what lies between them and nowhere else, and what was
joined can always be moved together in the graph.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from torch.fx import Graph, Node

from kimigraph.ir.launches import is_view
from kimigraph.ir.purity import is_pure, mutated_arguments, storage_root

MOST_APART = 1000
"""Units between the first and the last of a plan: several layers."""


@dataclass(eq=False)
class Unit:
    """Nodes that stay together, in order; ``nodes`` is one node until units are joined."""

    nodes: list[Node]
    place: int


@dataclass
class Order:
    """The units of a graph in an order that it may run in."""

    units: list[Unit | None]
    unit_of: dict[Node, Unit]
    before: dict[Node, set[Node]] = field(default_factory=lambda: {})
    """What must have run before a node: its arguments, and earlier uses of storage that one of the two writes."""

    @classmethod
    def of(cls, graph: Graph) -> "Order":
        """One unit a node, in graph order."""
        units = [Unit([node], place) for place, node in enumerate(graph.nodes)]
        return cls(list(units), {unit.nodes[0]: unit for unit in units}, _dependences(graph))

    def plan(self, units: Sequence[Unit]) -> list[Unit] | None:
        """The units from the first to the last of ``units`` in an order where those are neighbours.

        None where there is no such order: something between needs a result of one and gives another what it needs. Also
        where they stand further apart than ``MOST_APART``: a plan looks at all that lies between, and a graph of many
        layers would take the square of the time.
        """
        chosen = sorted(set(units), key=lambda unit: unit.place)
        if chosen[-1].place - chosen[0].place > MOST_APART:
            return None
        inside = set(chosen)
        produced, tainted = set[Node](), set[Node]()
        early: list[Unit] = []
        late: list[Unit] = []
        for unit in self.units[chosen[0].place : chosen[-1].place + 1]:
            if unit is None:
                continue
            nodes = unit.nodes
            needs = self.before[nodes[0]] if len(nodes) == 1 else set[Node]().union(*(self.before[n] for n in nodes))
            if unit in inside:
                if needs & tainted:
                    return None
                produced.update(unit.nodes)
            elif needs & produced or needs & tainted:
                tainted.update(unit.nodes)
                late.append(unit)
            else:
                early.append(unit)
        return [*early, *chosen, *late]

    def join(self, units: Sequence[Unit], plan: Sequence[Unit]) -> Unit:
        """Make one unit of ``units``, with what lies between them placed as the plan says."""
        chosen = sorted(set(units), key=lambda unit: unit.place)
        first, last = chosen[0].place, chosen[-1].place
        joined = Unit([node for unit in chosen for node in unit.nodes], first)
        laid: list[Unit | None] = []
        for unit in plan:
            if unit is chosen[0]:
                laid.append(joined)
            elif unit not in chosen:
                laid.append(unit)
        laid += [None] * (last + 1 - first - len(laid))
        self.units[first : last + 1] = laid
        for place, unit in enumerate(laid, start=first):
            if unit is not None:
                unit.place = place
        for node in joined.nodes:
            self.unit_of[node] = joined
        return joined

    def apply(self) -> None:
        """Put the nodes of the graph into this order."""
        previous: Node | None = None
        for unit in self.units:
            for node in unit.nodes if unit is not None else ():
                if previous is not None:
                    previous.append(node)
                previous = node


def _dependences(graph: Graph) -> dict[Node, set[Node]]:
    known: dict[Node, Node] = {}
    roots = {node: storage_root(node, known) for node in graph.nodes}
    written = {node: [roots[target] for target in mutated_arguments(node)] for node in graph.nodes}
    changing = {root for found in written.values() for root in found}
    before: dict[Node, set[Node]] = {}
    last_write: dict[Node, Node] = {}
    readers: dict[Node, list[Node]] = {}
    last_effect: Node | None = None
    first_call: Node | None = None
    for node in graph.nodes:
        needs = set(node.all_input_nodes)
        if node.op == "placeholder":
            needs |= {previous for previous in (first_call,) if previous is not None}
            first_call = node
        elif first_call is not None:
            needs.add(first_call)
        if not is_view(node):
            needs |= _hazards(node, _read(node, roots, changing), written[node], last_write, readers)
        if node.op == "output" or (not written[node] and node.op != "placeholder" and not is_pure(node)):
            needs |= {last_effect} if last_effect is not None else set()
            last_effect = node
        needs.discard(node)
        before[node] = needs
    output = next(iter(reversed(graph.nodes)))
    before[output] |= {node for node in graph.nodes if node is not output}
    return before


def _read(node: Node, roots: dict[Node, Node], changing: set[Node]) -> Iterable[Node]:
    """The storages that a node reads and that something writes."""
    return {roots[argument] for argument in node.all_input_nodes} & changing


def _hazards(
    node: Node,
    read: Iterable[Node],
    written: Iterable[Node],
    last_write: dict[Node, Node],
    readers: dict[Node, list[Node]],
) -> set[Node]:
    """Earlier nodes that must not change places with this one; notes what it reads and writes itself."""
    needs: set[Node] = set()
    for root in read:
        if root in last_write:
            needs.add(last_write[root])
        readers.setdefault(root, []).append(node)
    for root in written:
        needs |= set(readers.get(root, ()))
        if root in last_write:
            needs.add(last_write[root])
        last_write[root], readers[root] = node, []
    return needs
