"""Products that share their left operand, computed as one: which, what that costs, and the rewrite."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from kimigraph.ir.cost import Work, serial_seconds, touched_bytes, work_of
from kimigraph.ir.dependences import Dependences
from kimigraph.ir.device import Device
from kimigraph.passes.algebra.products import (
    Product,
    beside,
    copies,
    is_aligned,
    leaves_the_graph,
    merged_node_arguments,
    merged_work,
    ordered,
)
from kimigraph.passes.algebra.refusal import Refused
from kimigraph.passes.algebra.rewrite import call, replace

ATEN = torch.ops.aten


@dataclass(frozen=True)
class Plan:
    """Products that become one, in the order of their columns, with what that costs and what it replaces."""

    members: tuple[Product, ...]
    runs: tuple[tuple[Node, list[Product]], ...]
    apart: float
    together: Work
    device: Device

    @property
    def pays(self) -> bool:
        """Whether one product is faster than the several."""
        return self.together.seconds(self.device) < self.apart

    def describe(self) -> str:
        """The priced alternatives, for a remark."""
        weights = sum(touched_bytes(member.weight.meta["val"]) for member in self.members)
        return (
            f"{self.apart * 1e6:.2f} us apart, {self.together.describe(self.device)} together on {self.device.name};"
            f" {weights / 1e6:.3g} MB of weights are concatenated when the program is bound"
        )


def plan_for(
    group: Sequence[Product], dependences: Dependences, device: Device, miss: Callable[[Refused], None]
) -> Plan | None:
    """What to merge of a group, or None when fewer than two products are left; ``miss`` hears why one stays out.

    Raises Refused when one product is slower than the several.
    """
    kept: list[Product] = []
    for product in group if len(group) > 1 else ():
        try:
            _check(product)
            kept.append(product)
        except Refused as refusal:
            miss(refusal)
    while len(kept) > 1:
        path = dependences.path([product.node for product in kept])
        if path is None:
            break
        miss(Refused(f"{path[1].name} waits for {path[0].name}", path[1], 1))
        kept = [product for product in kept if product.node is not path[1]]
    if len(kept) < 2:
        return None
    plan = _priced(kept, device)
    if not plan.pays:
        raise Refused(f"one product does not pay: {plan.describe()}", kept[0].node, 1)
    return plan


def merge_products(graph: Graph, plan: Plan) -> Node:
    """Put one product in the place of the first member, and slices of its result in the places of all."""
    nodes = [member.node for member in plan.members]
    first = min(nodes)
    leader = next(member for member in plan.members if member.node is first)
    weight = _side_by_side(graph, [member.weight for member in plan.members], 0 if leader.rows else 1, first)
    biases = [member.bias for member in plan.members if member.bias is not None]
    bias = _side_by_side(graph, biases, 0, first) if biases else None
    target, arguments = merged_node_arguments([leader], weight, bias)
    merged = call(graph, target, arguments, like=first, before=first, replaces=nodes)
    begins = _begins(plan.members)
    for concatenation, run in plan.runs:
        width = sum(member.width for member in run)
        part = _part(graph, merged, begins[run[0].node], width, concatenation, first)
        replace(concatenation, part)
        graph.erase_node(concatenation)
    for member in plan.members:
        if member.node.users:
            replace(member.node, _part(graph, merged, begins[member.node], member.width, member.node, first))
    for node in nodes:
        graph.erase_node(node)
    return merged


def _check(product: Product) -> None:
    if leaves_the_graph(product.node):
        raise Refused("its result is returned or written, so it needs memory of its own", product.node, 1)
    if not is_aligned(product):
        raise Refused("its columns are no multiple of 16 bytes", product.node, 1)


def _priced(members: Sequence[Product], device: Device) -> Plan:
    """The plan, without members whose parts would have to be copied for more than their share of the gain."""
    while True:
        columns, runs = ordered(members)
        concatenated = {member.node for _, run in runs for member in run}
        dear = _dear(columns, concatenated, device) if len(columns) > 2 else None
        if dear is None:
            break
        members = [member for member in members if member is not dear]
    works = [work_of(member.node) for member in columns] + [work_of(node) for node, _ in runs]
    moved = [work for member in columns for _, work in _copies(member, columns) if member.node not in concatenated]
    together = sum(moved, merged_work(columns))
    return Plan(tuple(columns), tuple(runs), serial_seconds(works, device), together, device)


def _dear(members: Sequence[Product], concatenated: set[Node], device: Device) -> Product | None:
    """A member whose copies cost more than a launch saved."""
    saved = Work(launches=1).seconds(device)
    for member in members:
        if member.node not in concatenated:
            if serial_seconds((work for _, work in _copies(member, members)), device) > saved:
                return member
    return None


def _copies(member: Product, members: Sequence[Product]) -> list[tuple[Node, Work]]:
    """What has to be copied when the member's result is columns of the merged one."""
    return copies(member.node, beside(member.node.meta["val"], sum(other.width for other in members)))


def _begins(members: Sequence[Product]) -> dict[Node, int]:
    """Where each member's columns begin."""
    begins: dict[Node, int] = {}
    for member in members:
        begins[member.node] = sum(other.width for other in members[: len(begins)])
    return begins


def _side_by_side(graph: Graph, parts: Sequence[Node], dim: int, before: Node) -> Node:
    node = call(graph, ATEN.cat.default, (list(parts), dim), like=before, before=before)
    node.meta["prepared"] = True
    return node


def _part(graph: Graph, merged: Node, begin: int, width: int, old: Node, before: Node) -> Node:
    """Columns of the merged result in the shape of what they stand for."""
    node = call(graph, ATEN.slice.Tensor, (merged, -1, begin, begin + width), like=old, before=before)
    wanted = list(old.meta["val"].shape)
    if list(node.meta["val"].shape) == wanted:
        return node
    return call(graph, ATEN.view.default, (node, wanted), like=old, before=before)
