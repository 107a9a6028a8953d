"""Holes in the kernels of large operators: what stands beside one and fits becomes an operand of it.

``kda_decode`` takes the product that gives its gate's logits, ``moe_experts`` the sum behind it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import torch
from torch._ops import OpOverload
from torch.fx import Graph, Node

from kimigraph.ir.cost import Work, serial_seconds, touched_bytes, work_of
from kimigraph.ir.device import Device
from kimigraph.ir.fake import infer
from kimigraph.ir.launches import can_view
from kimigraph.ir.operators import OPERATORS
from kimigraph.ir.provenance import module_path, source_line
from kimigraph.ir.purity import mutation_between
from kimigraph.ir.remarks import Remark
from kimigraph.ir.schemas import bind
from kimigraph.passes.algebra.layout import contiguous, layout
from kimigraph.passes.algebra.nodes import FLOATS, argument, dtype, is_view, packet, shape
from kimigraph.passes.algebra.refusal import Refused
from kimigraph.passes.algebra.rewrite import ATEN, call, replace
from kimigraph.passes.base import PassContext

MOST_RANK = 256
"""Numbers a token of which a gate's logits are made: each program keeps its head's rows of the weight in registers."""

CACHE_RATE = 2
"""By how much faster than from memory a weight comes that another program has read before: an estimate."""


@dataclass(frozen=True)
class Filling:
    """An operator, what it takes in, the operand that it gets for it under which name, and the work of both forms."""

    operator: Node
    joined: Node
    views: tuple[Node, ...]
    operands: dict[str, Node]
    apart: tuple[Work, ...]
    together: Work

    def prices(self, device: Device) -> str:
        """For a remark."""
        apart = serial_seconds(self.apart, device) * 1e6
        return f"{apart:.2f} us apart, {self.together.describe(device)} together on {device.name}"


def fill_holes(graph: Graph, pass_name: str, context: PassContext) -> Iterator[Remark]:
    """Fill every hole where that is legal and pays; a remark for each, and for each near miss."""
    rules = {OPERATORS["kda_decode"].overload: gate_product, OPERATORS["moe_experts"].overload: residual_sum}
    for node in list(graph.nodes):
        rule = rules.get(node.target) if node.op == "call_function" else None
        try:
            filling = rule(node) if rule is not None else None
            if filling is None:
                continue
            prices = filling.prices(context.device)
            if filling.together.seconds(context.device) >= serial_seconds(filling.apart, context.device):
                raise Refused(f"one kernel does not pay: {prices}", filling.joined, 1)
        except Refused as refusal:
            yield refusal.remark(pass_name, node)
            continue
        if context.allow(f"{node.name} ({source_line(node) or 'no source line'})"):
            message = f"{filling.joined.name} became part of {node.name}: {prices}"
            names = (filling.joined.name, node.name)
            taken = filling.joined.meta.get("replaces", (filling.joined.name,))
            node.meta["replaces"] = (*node.meta.get("replaces", (node.name,)), *taken)
            (_take_product if filling.joined < node else _take_sum)(graph, filling)
            source, module = source_line(node), module_path(node)
            yield Remark("passed", pass_name, message, node.name, source, names, score=2, module=module)


def gate_product(node: Node) -> Filling | None:
    """The product that gives a ``kda_decode``'s gate logits; None where they are no product's."""
    gate = argument(node, "gate")
    product, views = _below(gate)
    plain = packet(product) in ("mm", "matmul") or (packet(product) == "linear" and argument(product, "bias") is None)
    if not plain or argument(node, "gate_weight") is not None:
        return None
    rows, weight = product.args[:2]
    if not isinstance(rows, Node) or not isinstance(weight, Node) or len(shape(weight)) != 2:
        return None
    batch, tokens = shape(gate)[:2]
    if layout(product, views) != contiguous(shape(gate)) or prod(shape(rows)[:-1]) != batch * tokens:
        raise Refused("the gate's logits are in another order than the product gives them", product, 1)
    if shape(rows)[-1] > MOST_RANK:
        raise Refused(f"the gate's product is deeper than {MOST_RANK}", product, 1)
    if dtype(weight) not in FLOATS or not can_view(rows.meta["val"], torch.Size((batch, tokens, shape(rows)[-1]))):
        raise Refused("the gate's product has rows that the kernel cannot read", product, 1)
    _require_alone([product, *views], node)
    for operand in (rows, weight):
        _require_unwritten(operand, product, node)
    alone, read = work_of(node), touched_bytes(weight.meta["val"])
    # Programs of all sequences read the weight, of which the first alone finds it in memory.
    moved = alone.bytes - touched_bytes(gate.meta["val"]) + touched_bytes(rows.meta["val"])
    moved += read + (batch - 1) * read // CACHE_RATE
    together = Work(moved, (alone + work_of(product)).flops, alone.launches)
    operands = {"gate": rows, "gate_weight": weight}
    return Filling(node, product, tuple(views), operands, (work_of(product), alone), together)


def residual_sum(node: Node) -> Filling | None:
    """The sum behind a ``moe_experts``; None where its result is not added to anything."""
    items = [user for user in node.users if user.args[1] == 0]
    if len(items) != 1 or argument(node, "residual") is not None:
        return None
    chain = items
    while len(chain[-1].users) == 1 and is_view(next(iter(chain[-1].users))):
        chain.append(next(iter(chain[-1].users)))
    last, total = chain[-1], next(iter(chain[-1].users), None)
    if total is None or packet(total) != "add" or argument(total, "alpha", 1) != 1 or len(total.args) < 2:
        return None
    other = next((operand for operand in total.args[:2] if operand is not last), None)
    if not isinstance(other, Node):
        return None
    if {shape(other), shape(last)} != {shape(total)} or {dtype(other), dtype(last)} != {dtype(total)}:
        raise Refused("what is added to the experts has another shape or type", total, 1)
    ordered = layout(items[0], chain[1:]) == contiguous(shape(total))
    if not ordered or not can_view(other.meta["val"], torch.Size(shape(items[0]))):
        raise Refused("what is added to the experts is in another order", total, 1)
    _require_alone(chain, total)
    early = next((user for item in node.users for user in item.users if user < total), None)
    if early is not None and early not in chain:
        raise Refused(f"{early.name} reads the experts' choice before the sum", early, 1)
    for operand in node.all_input_nodes:
        _require_unwritten(operand, node, total)
    alone = work_of(node)
    together = Work(alone.bytes + touched_bytes(other.meta["val"]), (alone + work_of(total)).flops, alone.launches)
    return Filling(node, total, tuple(chain[1:]), {"residual": other}, (alone, work_of(total)), together)


def _take_product(graph: Graph, filling: Filling) -> None:
    node, rows = filling.operator, filling.operands["gate"]
    batch, tokens = shape(argument(node, "gate"))[:2]
    weight = filling.operands["gate_weight"]
    if packet(filling.joined) != "linear":
        weight = call(graph, ATEN.t.default, (weight,), like=weight, before=node)
    gate = _seen_as(graph, rows, (batch, tokens, shape(rows)[-1]), node)
    _give(node, {"gate": gate, "gate_weight": weight})
    for gone in (*reversed(filling.views), filling.joined):
        graph.erase_node(gone)


def _take_sum(graph: Graph, filling: Filling) -> None:
    node, total = filling.operator, filling.joined
    items = list(node.users)
    first = next(item for item in items if item.args[1] == 0)
    for moved in (node, *items, *filling.views):
        total.prepend(moved)
    _give(node, {"residual": _seen_as(graph, filling.operands["residual"], shape(first), node)})
    replace(total, filling.views[-1] if filling.views else first)
    graph.erase_node(total)


def _give(node: Node, operands: dict[str, Node]) -> None:
    """Give a call operands by name."""
    assert isinstance(node.target, OpOverload)
    given = bind(node) | operands
    positional = [declared.name for declared in node.target._schema.arguments if not declared.kwarg_only]
    node.args = tuple(given[name] for name in positional)
    node.kwargs = {name: value for name, value in node.kwargs.items() if name not in positional}
    infer(node)


def _seen_as(graph: Graph, node: Node, sizes: tuple[int, ...], before: Node) -> Node:
    if shape(node) == tuple(sizes):
        return node
    return call(graph, ATEN.view.default, (node, list(sizes)), like=node, before=before)


def _below(node: Node) -> tuple[Node, list[Node]]:
    """What views lead to, and they in order."""
    chain: list[Node] = []
    while is_view(node) and isinstance(node.args[0], Node):
        chain.insert(0, node)
        node = node.args[0]
    return node, chain


def _require_alone(nodes: list[Node], end: Node) -> None:
    inside = {*nodes, end}
    for node in nodes:
        for user in node.users:
            if user not in inside:
                raise Refused(f"the intermediate {node.name} is used elsewhere, by {user.name}", node, 1)


def _require_unwritten(operand: Node, first: Node, last: Node) -> None:
    writer = mutation_between(first.graph, operand, first, last)
    if writer is not None and writer is not last:
        raise Refused(f"the operand {operand.name} is written between its use and {last.name}", writer, 1)
