"""Grows regions: a node joins the region of what it reads wherever the whole is one loop nest and costs less."""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from torch.fx import Graph, Node

from kimigraph.ir.branches import common_branch
from kimigraph.ir.cost import Work, fused_work, work_of
from kimigraph.ir.device import Device
from kimigraph.ir.launches import launches_of
from kimigraph.ir.pointwise import Unfusable, lower
from kimigraph.ir.pointwise.loops import is_known, stands_alone
from kimigraph.ir.pointwise.prepared import has_long_rows, is_streamed, prepared_work, weights_multiplied
from kimigraph.ir.pointwise.products import ATEN, MOST_LINES, is_preparation, is_product, lines_of
from kimigraph.ir.pointwise.values import NARROW
from kimigraph.ir.pointwise.views import SPLITS, is_index_map, view_source
from kimigraph.ir.row_products import is_widening
from kimigraph.passes.algebra.refusal import Refused
from kimigraph.passes.pointwise.order import Order, Unit


@dataclass
class Growth:
    """Regions of one graph while they grow.

    ``most`` is the largest number of nodes of a region, ``products`` whether products join regions. ``prepares`` with
    how many weights long rows may be multiplied in the kernel that prepares them. Attention residuals have no price
    there: that every program makes its own costs what a launch costs, with one weight; with two a kernel before is
    faster (measured on an H200). ``lone`` whether a product that nothing joins is a region.
    """

    order: Order
    device: Device
    most: int
    products: bool = True
    prepares: int = 0
    lone: bool = False
    misses: list[tuple[Node, Refused]] = field(default_factory=lambda: [])
    _works: dict[Unit, Work] = field(default_factory=lambda: {})

    def run(self, graph: Graph) -> list[Unit]:
        """Join what can be joined; the units that start at least two kernels apart, in order."""
        for node in graph.nodes:
            if _computes(node):
                self._grow(node)
        for node in graph.nodes if self.products else ():
            if is_product(node) and launches_of(node) and 1 <= lines_of(node) <= MOST_LINES:
                self._surround(node)
        for node in graph.nodes if self.products else ():
            if is_preparation(node):
                self._prepare(node)
        found = {self.order.unit_of[node] for node in graph.nodes if launches_of(node)}
        return sorted((unit for unit in found if self._is_region(unit)), key=lambda unit: unit.place)

    def _is_region(self, unit: Unit) -> bool:
        """Whether the unit starts several kernels apart, or is a product of few rows in 16 bits.

        Of that a library may make two launches, one for parts of its depth and one that adds them up.
        """
        if launches(unit.nodes) > 1 or len(unit.nodes) > 1 or not self.lone:
            return launches(unit.nodes) > 1
        node = unit.nodes[0]
        narrow = node.target is ATEN.linear.default and node.meta["val"].dtype in NARROW
        return narrow and 1 <= lines_of(node) <= MOST_LINES and stands_alone(node)

    def _grow(self, node: Node) -> None:
        """Join the node with the regions of its operands, all at once or else one after the other."""
        paths = [path for path in map(_path, node.all_input_nodes) if path is not None]
        if len(paths) > 1:
            with suppress(Refused):
                if self._join([node, *(step for path in paths for step in path)]):
                    return
        for path in paths:
            try:
                self._join([node, *path])
            except Refused as refusal:
                self.misses.append((node, refusal))

    def _surround(self, product: Node) -> None:
        """Join a product of few rows with what uses its columns, then with what computes its rows."""
        users: dict[Unit, list[Node]] = {}
        for path in _paths_out(product):
            users.setdefault(self.order.unit_of[path[-1]], []).extend(path)
        for path in (*users.values(), *filter(None, map(_path, product.all_input_nodes))):
            try:
                self._join([product, *path])
            except Refused as refusal:
                self.misses.append((product, refusal))

    def _prepare(self, node: Node) -> None:
        """Join what prepares rows with all products of them, then with what it reads."""
        steps = _to_products(node)
        if steps is not None:
            for path in (steps, *filter(None, map(_path, node.all_input_nodes))):
                with suppress(Refused):
                    self._join([node, *path])

    def _join(self, steps: Sequence[Node]) -> bool:
        """Join nodes, with the regions that they are in; whether that could be done.

        Refused where everything but the order of reads and writes speaks for it.
        """
        units = sorted({self.order.unit_of[step] for step in steps}, key=lambda unit: unit.place)
        if len(units) == 1:
            return True
        members = [member for unit in units for member in unit.nodes]
        apart = len(members) > self.most or common_branch(members) is None
        plan = None if apart else self.order.plan(units)
        if plan is None:
            return False
        try:
            loops = lower(members, results_of(members))
        except Unfusable as reason:
            if any(word in reason.reason for word in ("writes", "written", "overwrites")):
                raise Refused(f"no single kernel: {reason.reason}", reason.node, score=1) from reason
            return False
        mixed = any(map(is_preparation, members))
        if loops.depths and not is_streamed(loops) and (mixed or has_long_rows(loops)):
            if weights_multiplied(loops) > self.prepares:
                return False
        work = fused_work(members) + (Work() if mixed else prepared_work(loops))
        if work.seconds(self.device) >= sum(self._work(unit).seconds(self.device) for unit in units):
            return False
        self._works[self.order.join(units, plan)] = work
        return True

    def _work(self, unit: Unit) -> Work:
        if unit not in self._works:
            self._works[unit] = fused_work(unit.nodes) if len(unit.nodes) > 1 else work_of(unit.nodes[0])
        return self._works[unit]


def _paths_out(product: Node) -> list[list[Node]]:
    """From a product through views to each operation that uses it."""
    found: list[list[Node]] = []
    pending: list[list[Node]] = [[user] for user in product.users]
    while pending:
        path = pending.pop(0)
        last = path[-1]
        if launches_of(last):
            found += [path] if _computes(last) else []
        elif is_index_map(last) or last.target in SPLITS:
            pending += [[*path, user] for user in last.users]
    return found


def _to_products(node: Node) -> list[Node] | None:
    """All that uses a node, through views and casts up to products; None where anything else uses it."""
    found: list[Node] = []
    pending = list(node.users)
    while pending:
        user = pending.pop(0)
        if not is_product(user):
            if not (is_index_map(user) or is_widening(user)):
                return None
            pending += user.users
        found.append(user)
    return found


def launches(nodes: Iterable[Node]) -> int:
    """How many kernels the nodes start apart from one another."""
    return sum(launches_of(node) for node in nodes)


def results_of(members: Sequence[Node]) -> list[Node]:
    """The members whose results are used outside, by themselves or through views of them."""
    inside = set(members)
    return [node for node in members if launches_of(node) and any(_leaves(user, inside) for user in node.users)]


def _leaves(user: Node, inside: set[Node]) -> bool:
    if user not in inside:
        return True
    return not launches_of(user) and any(_leaves(other, inside) for other in user.users)


def _computes(node: Node) -> bool:
    return bool(launches_of(node)) and is_known(node)


def _path(node: Node) -> list[Node] | None:
    """From an operand down through views to what computes it; None where that comes from outside all regions."""
    path: list[Node] = []
    while not launches_of(node):
        if not is_index_map(node):
            return None
        source = view_source(node)
        path.append(node)
        if node.args[0] is not source and isinstance(node.args[0], Node):
            path.append(node.args[0])  # the split that this is a part of
        node = source
    return [*path, node] if _computes(node) else None
