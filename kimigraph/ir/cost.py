"""What work costs: bytes, FLOPs and launches of nodes and regions, and the seconds they take on a device.

Every decision of a pass about profit asks here and says so in a remark. Nothing is measured while compiling: the
figures of a device come from its file (``kimigraph.ir.device``), so that the same graph is decided alike everywhere.

    device = context.device
    apart = serial_seconds((work_of(node) for node in nodes), device)
    together = fused_work(nodes)
    if together.seconds(device) < apart: ...
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import Graph, Node

from kimigraph.ir.device import Device
from kimigraph.ir.launches import launches_of
from kimigraph.ir.open_sizes import most
from kimigraph.ir.operators import cost_of, operator_of
from kimigraph.ir.purity import mutated_arguments, region_module

VECTOR = "vector"
"""The unit of work that is no matrix product."""

_PRODUCTS = frozenset(("linear", "matmul", "mm", "bmm", "addmm", "baddbmm"))
_LOOKUPS = frozenset(("embedding", "index", "gather", "index_select"))
_SCATTERS = frozenset(("index_copy_", "index_put_", "scatter_", "scatter_add_", "index_add_"))


def _no_flops() -> dict[str, int]:
    return {}


@dataclass(frozen=True)
class Work:
    """Bytes through device memory, FLOPs by the unit that does them (a dtype's name, or ``vector``), launches."""

    bytes: int = 0
    flops: Mapping[str, int] = field(default_factory=_no_flops)
    launches: int = 0

    def __add__(self, other: "Work") -> "Work":
        units = {unit: self.flops.get(unit, 0) + other.flops.get(unit, 0) for unit in (*self.flops, *other.flops)}
        return Work(self.bytes + other.bytes, units, self.launches + other.launches)

    @property
    def total_flops(self) -> int:
        """The FLOPs of all units."""
        return sum(self.flops.values())

    def seconds(self, device: Device) -> float:
        """Time on ``device``: bytes at its copy rate or FLOPs at their rates, whichever is longer, and the launches."""
        moving = self.bytes / device.bytes_per_second
        computing = sum(count / device.rate(unit) for unit, count in self.flops.items())
        return max(moving, computing) + self.launches * (device.launch_seconds + device.latency_seconds)

    def describe(self, device: Device) -> str:
        """For a remark: ``12.3 us (4.1 MB, 0.02 GFLOP, 3 launches)``."""
        launches = "1 launch" if self.launches == 1 else f"{self.launches} launches"
        return (
            f"{self.seconds(device) * 1e6:.2f} us ({self.bytes / 1e6:.3g} MB, {self.total_flops / 1e9:.3g} GFLOP,"
            f" {launches})"
        )


def serial_seconds(works: Iterable[Work], device: Device) -> float:
    """Seconds of pieces that run one after the other: the sum of their own."""
    return sum(work.seconds(device) for work in works)


def work_of(node: Node) -> Work:
    """What one node does as a kernel of its own: nothing for a view, a region's as one kernel."""
    launches = launches_of(node)
    if not launches:
        return Work()
    if node.op == "call_module":
        child = region_module(node)
        return Work(launches=launches) if child is None else fused_work(list(child.graph.nodes))
    traffic = _traffic(node)
    return Work(sum(traffic.reads.values()) + traffic.written, traffic.flops, launches)


def fused_work(nodes: Collection[Node]) -> Work:
    """What ``nodes`` do as one kernel: what comes from outside is read once, what is used outside is written once.

    Works on nodes of a graph or on all nodes of a region's child. Products keep their FLOPs, in one launch.
    """
    inside = {node for node in nodes if node.op not in ("placeholder", "output")}
    reads: dict[Node, int] = {}
    written = 0
    flops = Work()
    for node in inside:
        if not launches_of(node):
            continue
        traffic = _traffic(node)
        flops = flops + Work(flops=traffic.flops)
        for argument, amount in traffic.reads.items():
            source = _before_views(argument, inside)
            if source not in inside:
                reads[source] = max(reads.get(source, 0), amount)
        if mutated_arguments(node) or any(_leaves(user, inside) for user in node.users):
            written += traffic.written
    return Work(sum(reads.values()) + written, flops.flops, 1 if inside else 0)


def graph_seconds(graph: Graph, device: Device) -> dict[str, float]:
    """Seconds of each node of the graph that starts work, by name."""
    return {node.name: work_of(node).seconds(device) for node in graph.nodes if launches_of(node)}


def touched_bytes(value: Any) -> int:
    """Bytes of the elements of a tensor or of several; what an expanded tensor repeats counts once."""
    return sum(
        prod(
            size for size, step in zip(sizes_of(tensor), tensor.stride(), strict=True) if type(step) is not int or step
        )
        * tensor.element_size()
        for tensor in _tensors(value)
    )


def sizes_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """The sizes of a tensor; of one that the run alone knows, the largest that it may be."""
    return tuple(most(size) for size in tensor.shape)


@dataclass(frozen=True)
class _Traffic:
    """Bytes that a node reads of each argument, bytes that it writes, its FLOPs."""

    reads: dict[Node, int]
    written: int
    flops: dict[str, int]


def _traffic(node: Node) -> _Traffic:
    value = node.meta.get("val")
    if operator_of(node) is not None:
        return _semantic(node)
    if node.op == "call_module":
        work = work_of(node)
        return _Traffic(dict.fromkeys(node.all_input_nodes, 0), work.bytes, dict(work.flops))
    reads = {argument: touched_bytes(argument.meta.get("val")) for argument in node.all_input_nodes}
    written, name = touched_bytes(value), _name(node)
    changed = mutated_arguments(node)
    if changed and name in _SCATTERS:  # what is written is as large as what is read; the rest of the target stays
        reads |= dict.fromkeys(changed, 0)
        written = max((amount for argument, amount in reads.items() if argument not in changed), default=0)
    elif changed and name in ("copy_", "fill_", "zero_"):
        reads |= dict.fromkeys(changed, 0)
    elif name in _LOOKUPS and node.all_input_nodes:
        reads[node.all_input_nodes[0]] = written
    return _Traffic(reads, written, _flops(node, name))


def _semantic(node: Node) -> _Traffic:
    """The operator's own count; its operands are shared out by size, so that a fused neighbour can drop one."""
    cost = cost_of(node)
    written = min(touched_bytes(node.meta.get("val")), cost.bytes)
    sizes = {argument: touched_bytes(argument.meta.get("val")) for argument in node.all_input_nodes}
    scale = (cost.bytes - written) / max(sum(sizes.values()), 1)
    return _Traffic({a: int(size * scale) for a, size in sizes.items()}, written, {_unit(node): cost.flops})


def _flops(node: Node, name: str) -> dict[str, int]:
    inputs = [tensor for source in node.all_input_nodes for tensor in _tensors(source.meta.get("val"))]
    outputs = _tensors(node.meta.get("val"))
    elements = sum(prod(sizes_of(tensor)) for tensor in outputs)
    counted: dict[str, Callable[[], int]] = {
        "scaled_dot_product_attention": lambda: _attention_flops(*inputs[:3]) if len(inputs) >= 3 else elements,
        "conv1d": lambda: 2 * elements * prod(sizes_of(inputs[1])[1:]) if len(inputs) >= 2 else elements,
    }
    if name in _PRODUCTS and inputs and outputs:
        left = inputs[1] if name in ("addmm", "baddbmm") and len(inputs) > 2 else inputs[0]
        return {_unit(node): 2 * elements * most(left.shape[-1])}
    if name in counted:
        return {_unit(node): counted[name]()}
    return {VECTOR: max([elements, *(prod(sizes_of(tensor)) for tensor in inputs)] if _reduces(name) else [elements])}


def _attention_flops(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> int:
    return 2 * prod(sizes_of(q)[:-1]) * most(k.shape[-2]) * (q.shape[-1] + v.shape[-1])


def _reduces(name: str) -> bool:
    return name in ("sum", "mean", "amax", "amin", "max", "min", "prod", "any", "all", "argmax", "topk")


def _unit(node: Node) -> str:
    tensors = [tensor for source in node.all_input_nodes for tensor in _tensors(source.meta.get("val"))]
    floats = [tensor.dtype for tensor in tensors if tensor.dtype.is_floating_point]
    return str(floats[0]).removeprefix("torch.") if floats else VECTOR


def _before_views(node: Node, inside: Collection[Node]) -> Node:
    """What a view inside the group is a view of; a view outside it is an argument like any other."""
    while node in inside and not launches_of(node) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def _leaves(user: Node, inside: Collection[Node]) -> bool:
    """Whether a use, or a view's uses in turn, lies outside the group."""
    if user not in inside:
        return True
    return not launches_of(user) and any(_leaves(other, inside) for other in user.users)


def _name(node: Node) -> str:
    if isinstance(node.target, OpOverload):
        return node.target.overloadpacket.__name__
    return str(node.target)


def _tensors(value: Any) -> list[torch.Tensor]:
    values = value if isinstance(value, list | tuple) else [value]
    return [item for item in values if isinstance(item, torch.Tensor)]
