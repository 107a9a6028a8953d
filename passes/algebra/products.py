"""Products with a weight, and what it means to compute several of them as one."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch.fx import Node

from kimigraph.ir.branches import branch_of
from kimigraph.ir.cost import Work, touched_bytes, work_of
from kimigraph.ir.launches import VIEWS_IF_POSSIBLE, can_view, launches_of
from kimigraph.ir.program import InputSpec
from kimigraph.ir.purity import mutated_arguments, storage_root
from kimigraph.passes.algebra.nodes import argument, dtype, packet

ATEN = torch.ops.aten
_TARGETS = frozenset((ATEN.linear.default, ATEN.mm.default, ATEN.matmul.default))
_ROW_VIEWS = frozenset(("view", "reshape", "_unsafe_view", "unsqueeze", "squeeze", "flatten"))
_TURNS = frozenset(("t", "transpose", "permute", "numpy_T"))
ALIGNMENT = 16
"""Bytes: a kernel's widest load. A part of a merged product that begins inside such a load would be read in pieces."""


@dataclass(frozen=True)
class Product:
    """``left`` [.., K] times a weight [N, K] (``rows``) or [K, N], plus a bias [N] or none.

    ``rows_of`` is the tensor whose rows ``left`` has, before views that only group rows.
    """

    node: Node
    left: Node
    rows_of: Node
    weight: Node
    rows: bool
    bias: Node | None

    @property
    def width(self) -> int:
        """N."""
        return self.weight.meta["val"].shape[0 if self.rows else 1]

    @property
    def key(self) -> tuple[Any, ...]:
        """Products with equal keys can be one: the same rows, types and form, no two branches that are kept apart."""
        types = dtype(self.left), dtype(self.weight)
        return self.rows_of, self.rows, *types, self.bias is None, branch_of(self.node)


def products(nodes: Sequence[Node], specs: Mapping[str, InputSpec]) -> Iterator[Product]:
    """The products of ``nodes`` with a two-dimensional weight that no step updates."""
    for node in nodes:
        found = _product(node) if node.target in _TARGETS else None
        if found is not None and _is_weight(found.weight, specs) and _is_weight(found.bias, specs, absent=True):
            yield found


def merged_node_arguments(
    members: Sequence[Product], weight: Node, bias: Node | None
) -> tuple[Any, tuple[Node | None, ...]]:
    """Target and arguments of the product that computes ``members`` side by side in its last dim."""
    first = members[0]
    left: Any = first.node.args[0]  # not ``first.left``: that may have been columns of what was merged since
    if first.rows:
        return ATEN.linear.default, (left, weight) if bias is None else (left, weight, bias)
    return ATEN.matmul.default, (left, weight)


def merged_work(members: Sequence[Product]) -> Work:
    """Bytes, FLOPs and the launch of the product that computes ``members`` side by side."""
    works = [work_of(member.node) for member in members]
    left = touched_bytes(members[0].left.meta["val"])
    flops = sum((Work(flops=work.flops) for work in works), Work()).flops
    return Work(sum(work.bytes for work in works) - left * (len(works) - 1), flops, 1)


def ordered(members: Sequence[Product]) -> tuple[list[Product], list[tuple[Node, list[Product]]]]:
    """The members in the order of their columns, and the concatenations that become one slice of the result.

    A concatenation of several members' results along the last dim, and of nothing else, costs nothing when its parts
    are neighbours, so they become neighbours. One that leaves the graph stays: it must have memory of its own.
    """
    by_node = {member.node: member for member in members}
    taken: list[Product] = []
    runs: list[tuple[Node, list[Product]]] = []
    for member in members:
        if member in taken:
            continue
        run = next((run for user in member.node.users for run in [_run(user, by_node)] if run), None)
        if run is not None and not any(part in taken for part in run):
            user = next(user for user in member.node.users if _run(user, by_node) == run)
            runs.append((user, run))
            taken += run
        else:
            taken.append(member)
    return taken, runs


def copies(node: Node, value: Any) -> list[tuple[Node, Work]]:
    """What must be copied when ``node`` has the strides of ``value`` instead of its own: the user and its work.

    ``value`` is a tensor on the meta device, or several. Kernels and ATen operators take strides; views that need
    neighbouring elements, and calls that ask for contiguous memory, do not.
    """
    found: list[tuple[Node, Work]] = []
    for user in node.users:
        if user.op != "call_function" or launches_of(user) or "_assert_tensor_metadata" in str(user.target):
            continue
        given = [value if argument is node else argument for argument in user.args]
        target: Any = user.target
        try:
            result = target(*given, **user.kwargs)
        except RuntimeError:
            result = None
        if result is None or _is_copy(user, value, result):
            size = touched_bytes(user.meta["val"])
            found.append((user, Work(2 * size, {"vector": size}, 1)))
        else:
            found += copies(user, result)
    return found


def beside(value: torch.Tensor, whole: int) -> torch.Tensor:
    """A tensor on the meta device like ``value``, but as columns of a contiguous one that is ``whole`` wide."""
    strides = [1]
    for size in reversed(value.shape[1:]):
        strides.insert(0, strides[0] * (whole if len(strides) == 1 else size))
    return torch.empty_strided(value.shape, strides, dtype=value.dtype, device="meta")


def leaves_the_graph(node: Node) -> bool:
    """Whether the step returns the node's memory, writes into it or addresses it: then it must be its own."""
    waiting = [node]
    for item in waiting:
        for user in item.users:
            if (
                user.op == "output"
                or packet(user) == "as_strided"
                or any(storage_root(written) is node for written in mutated_arguments(user))
            ):
                return True
            if storage_root(user) is node:
                waiting.append(user)
    return False


def is_aligned(product: Product) -> bool:
    """Whether what stands behind the product's columns begins at a multiple of ``ALIGNMENT`` bytes."""
    return product.width * product.node.meta["val"].element_size() % ALIGNMENT == 0


def _product(node: Node) -> Product | None:
    left, weight = node.args[0], node.args[1]
    bias = argument(node, "bias") if node.target is ATEN.linear.default else None
    if not isinstance(left, Node) or not isinstance(weight, Node):
        return None
    rows = node.target is ATEN.linear.default
    if packet(weight) in _TURNS and weight.meta["val"].dim() == 2 and weight.args[1:] != ([0, 1],):
        rows, weight = not rows, weight.args[0]
    if not isinstance(weight, Node) or not _is_matrix(weight) or left.meta["val"].dim() < 2:
        return None
    if not rows and node.target is ATEN.linear.default:
        return None
    if bias is not None and tuple(bias.meta["val"].shape) != (weight.meta["val"].shape[0],):
        return None  # a bias that is repeated over the columns is none for its neighbours
    return Product(node, left, _rows_of(left), weight, rows, bias)


def _is_matrix(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dim() == 2 and value.is_contiguous()


def _is_weight(node: Node | None, specs: Mapping[str, InputSpec], absent: bool = False) -> bool:
    if node is None:
        return absent
    spec = specs.get(node.name) if node.op == "placeholder" else None
    return spec is not None and spec.kind == "weight" and not spec.mutated


def _rows_of(left: Node) -> Node:
    """The node behind views that keep the last dim: it has the same rows in the same order."""
    while packet(left) in _ROW_VIEWS and isinstance(left.args[0], Node):
        before, after = left.args[0].meta["val"].shape, left.meta["val"].shape
        if not len(before) or before[-1] != after[-1] or prod(before) != prod(after):
            break
        left = left.args[0]
    return left


def _run(user: Node, by_node: Mapping[Node, Product]) -> list[Product] | None:
    """The members that ``user`` concatenates along the last dim, when it concatenates nothing else, each once."""
    if user.target is not ATEN.cat.default:
        return None
    parts: Any = user.args[0]
    dim, ndim = argument(user, "dim", 0), user.meta["val"].dim()
    if dim % ndim != ndim - 1 or len(set(parts)) != len(parts) or any(part not in by_node for part in parts):
        return None
    value = beside(user.meta["val"], sum(member.width for member in by_node.values()))
    if leaves_the_graph(user) or copies(user, value):
        return None
    return [by_node[part] for part in parts]


def _is_copy(user: Node, value: Any, result: Any) -> bool:
    """Whether an operator that views where it can made new memory."""
    if not isinstance(value, torch.Tensor) or not isinstance(result, torch.Tensor):
        return False
    if user.target is ATEN.contiguous.default:
        return not value.is_contiguous()
    return user.target in VIEWS_IF_POSSIBLE and not can_view(value, result.shape)
