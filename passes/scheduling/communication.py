"""Work that goes on while ranks communicate: what could run meanwhile, and sums in parts behind a product in parts."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch.fx import Node

from kimigraph.ir.collectives import Pair, is_collective, is_start
from kimigraph.ir.cost import Work, work_of
from kimigraph.ir.dependences import Dependence, starts_work
from kimigraph.ir.device import Device
from kimigraph.ir.purity import has_effect, mutated_arguments, storage_root
from kimigraph.passes.algebra.nodes import shape
from kimigraph.passes.algebra.rewrite import call

ATEN = torch.ops.aten
PARTS = (2, 4)
LATENCY_US, RATE = 13.0, 207.0
"""Of a collective of the library between two H200s: what it takes at least, and gigabytes a second behind that."""
DEARER = 1.25
"""Parts of a product together take up to so many times as long as the whole: bench/results/product_parts.json."""
REACH = 256
"""Nodes behind a collective that are looked at for work that does not wait for it: what they make lives longer."""


@dataclass(frozen=True)
class Links:
    """What connects the ranks of a collective: seconds that one takes however little it moves, and bytes a second."""

    latency: float
    rate: float

    def seconds(self, node: Node, ways: int, parts: int = 1) -> float:
        """Seconds of a collective among ``ways`` ranks, or of one of equal parts of it: a sum goes round twice."""
        rounds = 2 if "all_reduce" in str(node.target) else 1
        value: torch.Tensor = node.meta["val"]
        return self.latency + rounds * (ways - 1) / ways * value.nbytes / parts / self.rate


def sink_wait(pair: Pair, roots: dict[Node, Node]) -> None:
    """Put the wait, and views of what it gives, in front of the first node that uses them, or that writes what the
    collective reads."""
    views = [pair.wait]
    for node in views:
        views += [user for user in node.users if not starts_work(user) and user.op != "output" and user not in views]
    read = {storage_root(item, roots) for item in pair.start.all_input_nodes}
    for node in sorted(views, reverse=True):
        if not node.users:
            continue
        first, item = min(node.users), node.next
        while node is pair.wait and item is not first:
            if any(storage_root(written, roots) in read for written in mutated_arguments(item)):
                first = item
                break
            item = item.next
        first.prepend(node)


def hoist_start(pair: Pair, dependences: Sequence[Dependence]) -> None:
    """Put the collective behind the last node that it depends on: its input, and the collective before it.

    That one need not be waited for: a library runs the collectives of ranks in the order in which they begin.
    """
    wanted = [item.first for item in dependences if item.kind != "order of effects"]
    earlier = pair.start.prev
    while earlier.op != "root" and not is_collective(earlier):
        earlier = earlier.prev
    last = wanted[0]
    for node in [*wanted, *([earlier] if earlier.op != "root" else [])]:
        last = node if last < node else last
    while last.next.op == "placeholder":
        last = last.next
    if last.next is not pair.start:
        last.append(pair.start)


def work_between(pair: Pair, device: Device) -> float:
    """Seconds of what is queued between a collective and its wait."""
    seconds, node = 0.0, pair.start.next
    while node is not pair.wait:
        seconds, node = seconds + work_of(node).seconds(device), node.next
    return seconds


def independent_work(
    pair: Pair, dependences: dict[Node, list[Dependence]], device: Device, wanted: float
) -> tuple[list[Node], float]:
    """Nodes behind the wait that do not depend on it, nor on anything else that stands there, and their seconds.

    The nearest ones, until they take as long as ``wanted``.
    """
    chosen: dict[Node, None] = {}
    seconds, node = 0.0, pair.wait.next
    for _ in range(REACH):
        if node.op in ("output", "root") or seconds >= wanted:
            break
        before = [item.first for item in dependences[node]]
        overwrites = any(item.kind == "write after read" and is_start(item.first) for item in dependences[node])
        if not has_effect(node) and not overwrites and all(other < pair.wait or other in chosen for other in before):
            chosen[node] = None
            seconds += work_of(node).seconds(device)
        node = node.next
    return _at_work(chosen), seconds


def _at_work(chosen: dict[Node, None]) -> list[Node]:
    """Those that start work, and what these need: views alone hide nothing, and the host would come later to the work
    behind them."""
    kept = set[Node]()
    for node in reversed(chosen):
        if starts_work(node) or not kept.isdisjoint(node.users):
            kept.add(node)
    return [node for node in chosen if node in kept]


@dataclass(frozen=True)
class Split:
    """A sum of a product, both in so many parts of its rows; seconds as it is, and in parts."""

    pair: Pair
    product: Node
    parts: int
    whole: float
    split: float


def best_split(pair: Pair, links: Links, ways: int, device: Device) -> Split | None:
    """The quickest way to sum a product in parts; None where what is summed is no product with rows to share out."""
    [product] = pair.start.all_input_nodes
    if "all_reduce" not in str(pair.start.target) or product.target is not ATEN.linear.default:
        return None
    if len(product.users) != 1 or len(product.args) > 2 or product.kwargs:
        return None
    rows = prod(shape(product)[:-1])
    found = [
        Split(pair, product, parts, *_seconds(pair, product, parts, links, ways, device))
        for parts in PARTS
        if rows % parts == 0 and rows > parts
    ]
    return min(found, key=lambda split: split.split, default=None)


def _seconds(pair: Pair, product: Node, parts: int, links: Links, ways: int, device: Device) -> tuple[float, float]:
    """Seconds until the sum is there, as it is and in parts: a part is summed while the next is multiplied."""
    work, weight = work_of(product), product.all_input_nodes[1].meta["val"].nbytes
    one = links.seconds(pair.start, ways, parts)
    flops = {kind: amount // parts for kind, amount in work.flops.items()}
    each = DEARER * Work(weight + (work.bytes - weight) // parts, flops, 1).seconds(device)
    multiplied = summed = 0.0
    for _ in range(parts):
        multiplied += each
        summed = max(multiplied, summed) + one
    joined = Work(2 * pair.start.meta["val"].nbytes, launches=1).seconds(device)
    return work.seconds(device) + links.seconds(pair.start, ways), summed + joined


def split_sum(split: Split) -> list[Pair]:
    """Multiply and sum the rows part by part; the parts are joined where the whole was waited for."""
    pair, product, parts = split.pair, split.product, split.parts
    graph, (x, weight) = product.graph, product.args[:2]
    assert isinstance(x, Node)
    wide, rows = shape(product), prod(shape(product)[:-1])
    group: tuple[Any, ...] = pair.start.args[1:]

    def made(target: Any, arguments: tuple[Any, ...]) -> Node:
        return call(graph, target, arguments, like=product, before=pair.wait)

    flat = made(ATEN.reshape.default, (x, [rows, shape(x)[-1]]))
    found: list[Pair] = []
    starts: list[Node] = []
    for part in range(parts):
        own = made(ATEN.slice.Tensor, (flat, 0, part * rows // parts, (part + 1) * rows // parts))
        starts.append(made(pair.start.target, (made(ATEN.linear.default, (own, weight)), *group)))
    for start in starts:
        found.append(Pair(start, made(pair.wait.target, (start,))))
    whole = made(ATEN.view.default, (made(ATEN.cat.default, ([each.wait for each in found],)), list(wide)))
    pair.wait.replace_all_uses_with(whole, propagate_meta=False)
    for node in (pair.wait, pair.start, product):
        graph.erase_node(node)
    return found
