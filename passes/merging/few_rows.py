"""Products of the same few rows with weights of several types, as one kernel over a table of tiles."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch.fx import GraphModule, Node

from kimigraph.ir.branches import branch_of
from kimigraph.ir.cost import Work, fused_work, serial_seconds, work_of
from kimigraph.ir.dependences import Dependences
from kimigraph.ir.device import Device
from kimigraph.ir.fake import infer
from kimigraph.ir.launches import launches_of
from kimigraph.ir.purity import mutation_between
from kimigraph.ir.regions import extract_region
from kimigraph.ir.row_products import RowProduct, row_product, source_of
from kimigraph.passes.algebra.dependences import make_neighbours

_PRODUCT = "aten.linear.default"


@dataclass(frozen=True)
class RowGroup:
    """Products of one tensor's rows, and the casts between it and them."""

    products: tuple[RowProduct, ...]
    casts: tuple[Node, ...]

    @property
    def nodes(self) -> tuple[Node, ...]:
        """All that starts work."""
        return *self.casts, *(product.node for product in self.products)

    def apart(self, device: Device) -> float:
        """Seconds of one kernel after another."""
        return serial_seconds((work_of(node) for node in self.nodes), device)

    def together(self) -> Work:
        """The work of one kernel."""
        return fused_work([*self.nodes, *_views_between(self.products)])


def row_groups(nodes: Sequence[Node]) -> list[RowGroup]:
    """Products of the same few rows that start more than one kernel together, casts included; in graph order."""
    found: dict[tuple[Node, str], list[RowProduct]] = {}
    for node in nodes:
        product = row_product(node) if str(node.target) == _PRODUCT else None
        if product is not None:
            found.setdefault((product.source, branch_of(node)), []).append(product)
    groups = [RowGroup(tuple(products), tuple(_casts(products))) for products in found.values()]
    return [group for group in groups if len(group.nodes) > 1]


def independent(group: RowGroup, dependences: Dependences) -> RowGroup | None:
    """The group without products that wait for another of it; None when one kernel would be left.

    A cast before a product moves to it, so products whose rows were cast before a write of them stay out too.
    """
    kept: list[RowProduct] = []
    for product in group.products:
        apart = dependences.path([other.node for other in kept] + [product.node]) is None
        if apart and not _written_between([*kept, product]):
            kept.append(product)
    smaller = RowGroup(tuple(kept), tuple(_casts(kept)))
    return smaller if len(smaller.nodes) > 1 else None


def make_region(graph_module: GraphModule, group: RowGroup, name: str) -> Node:
    """Move the group into a horizontal region; the call that runs it. Casts with other users stay for those."""
    members: list[Node] = []
    for product in group.products:
        members += [*_own_chain(product), product.node]
    make_neighbours(members)
    return extract_region(graph_module, members, name, "horizontal")


def _written_between(products: Sequence[RowProduct]) -> bool:
    """Whether the rows are written between the first use of them and the last product."""
    nodes = sorted(node for product in products for node in (*_chain(product.node), product.node))
    source = products[0].source
    return len(nodes) > 1 and mutation_between(source.graph, source, nodes[0], nodes[-1]) is not None


def _casts(products: Sequence[RowProduct]) -> list[Node]:
    """The casts between the rows and the products, each once."""
    chains = (node for product in products for node in _chain(product.node))
    return [node for node in dict.fromkeys(chains) if launches_of(node)]


def _views_between(products: Sequence[RowProduct]) -> list[Node]:
    return [node for product in products for node in _chain(product.node) if not launches_of(node)]


def _chain(product: Node) -> list[Node]:
    """From the rows to the product: views and casts, in order."""
    chain: list[Node] = []
    node = product.args[0]
    while isinstance(node, Node) and node is not source_of(node):
        chain.insert(0, node)
        node = node.args[0]
    return chain


def _own_chain(product: RowProduct) -> list[Node]:
    """Copies of the views and casts before a product, which nothing else uses."""
    last = product.source
    copies: list[Node] = []
    for node in _chain(product.node):
        with product.node.graph.inserting_before(product.node):
            copy = node.graph.node_copy(node)
            copy.update_arg(0, last)
        copy.meta = {key: value for key, value in node.meta.items() if key != "val"}
        infer(copy)
        copies.append(copy)
        last = copy
    product.node.update_arg(0, last)
    return copies
