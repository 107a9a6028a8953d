"""Products of normed rows that are looked up in a table: the way into a decoder, as one kernel."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch.fx import GraphModule, Node

from kimigraph.ir.branches import common_branch
from kimigraph.ir.cost import Work, fused_work, serial_seconds, touched_bytes, work_of
from kimigraph.ir.device import Device
from kimigraph.ir.normed_lookup import NormedLookup, normed_lookup
from kimigraph.ir.purity import mutation_between
from kimigraph.ir.regions import extract_region
from kimigraph.passes.algebra.dependences import make_neighbours


@dataclass(frozen=True)
class Lookup:
    """Lookup, norm, what views the rows, and product, in order."""

    found: NormedLookup
    members: tuple[Node, ...]

    def apart(self, device: Device) -> float:
        """Seconds of two kernels: lookup and norm are one anyway."""
        found = self.found
        return serial_seconds((fused_work([found.lookup, found.norm]), work_of(found.product.node)), device)

    def together(self, device: Device) -> float:
        """Seconds of one kernel, most of whose programs wait for the rows that others norm."""
        kept = Work(2 * touched_bytes(self.found.norm.meta["val"]))  # written, and read by all
        return (fused_work(self.members) + kept).seconds(device) + device.wait_seconds

    def make_region(self, graph_module: GraphModule, name: str) -> Node:
        """Move the members into a horizontal region; the call that runs it."""
        make_neighbours(list(self.members))
        return extract_region(graph_module, self.members, name, "horizontal")


def lookups(nodes: Sequence[Node]) -> Iterator[Lookup]:
    """Those of a graph whose operands nobody writes before the product, and whose rows nobody uses before it."""
    for node in nodes:
        found = normed_lookup(node) if node.op == "call_function" else None
        if found is None:
            continue
        members = (found.lookup, found.norm, *_views(node, found.norm), node)
        given = (found.table, found.places, found.weight, found.lookup)
        written = any(mutation_between(node.graph, operand, found.lookup, node) is not None for operand in given)
        early = any(user < node and user is not found.norm for user in found.lookup.users)
        alone = all(len(member.users) == 1 for member in members[1:-1])
        if alone and not written and not early and common_branch(members) is not None:
            yield Lookup(found, members)


def _views(product: Node, norm: Node) -> list[Node]:
    """What stands between the norm and the product, in order."""
    chain: list[Node] = []
    node = product.args[0]
    while isinstance(node, Node) and node is not norm:
        chain.insert(0, node)
        node = node.args[0]
    return chain
