"""How the new value of a mutated input came about: the writes that lead from the old value to the new one.

In a functional graph each write makes a new *version* of a tensor. ``trace`` walks from the last version back to the
placeholder through operators that have an in-place twin (``index_copy`` and ``index_copy_``), through writes into a
part (``slice_scatter``), through views and through functionalized custom operators.
"""

import operator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import Node

from kimigraph.adapters.torch_export import functionalized_call

ATEN = torch.ops.aten
SCATTERS: dict[Any, Any] = {
    ATEN.slice_scatter.default: ATEN.slice.Tensor,
    ATEN.select_scatter.default: ATEN.select.int,
    ATEN.diagonal_scatter.default: ATEN.diagonal.default,
}
"""Functional writes into a part, and the view that is the part."""


@dataclass(frozen=True)
class Write:
    """One write: ``node`` is the functional node at whose place it happens.

    ``kind`` is ``twin`` (becomes its in-place twin), ``call`` (a custom operator), ``copy`` (a scatter that becomes a
    copy into the part) or ``joined`` (a scatter whose part was written in place already: nothing is left to do).
    """

    kind: str
    node: Node


@dataclass
class Trace:
    """The writes in order, and all nodes that stand for a version, with the memory each will denote."""

    placeholder: Node
    writes: list[Write] = field(default_factory=lambda: [])
    versions: dict[Node, Tensor] = field(default_factory=lambda: {})


def is_view(node: Any) -> bool:
    """Whether the node only looks at its first argument's memory, by its schema."""
    if not isinstance(node, Node) or not isinstance(node.target, OpOverload):
        return False
    schema = node.target._schema
    if node.target is ATEN._unsafe_view.default:
        return True
    shared = [argument.alias_info for argument in schema.arguments if argument.alias_info is not None]
    single = len(schema.returns) == 1 and str(schema.returns[0].type) == "Tensor"
    return single and bool(shared) and not any(info.is_write for info in shared)


def without_views(node: Any) -> Any:
    """The node whose memory ``node`` looks at."""
    while is_view(node):
        node = node.args[0]
    return node


def in_place_twin(node: Node) -> OpOverload | None:
    """The overload that writes into the first argument what ``node`` computes from it, or None.

    The result must look like the first argument: same shape, dtype and device.
    """
    target = node.target
    if not isinstance(target, OpOverload) or not node.args or not isinstance(node.args[0], Node) or is_view(node):
        return None
    namespace, name = target._schema.name.split("::")
    packet = getattr(getattr(torch.ops, namespace), name + "_", None)
    twin = getattr(packet, target._overloadname, None) if packet is not None else None
    if twin is None or any(argument.alias_info for argument in target._schema.arguments):
        return None
    written = [argument.alias_info is not None and argument.alias_info.is_write for argument in twin._schema.arguments]
    if not written[0] or any(written[1:]) or len(twin._schema.returns) != 1:
        return None
    return twin if _alike(node.meta["val"], node.args[0].meta["val"]) else None


def _alike(new: Any, old: Any) -> bool:
    if not isinstance(new, Tensor) or not isinstance(old, Tensor):
        return False
    return new.shape == old.shape and new.dtype == old.dtype and new.device == old.device


def same_layout(a: Tensor, b: Tensor) -> bool:
    """Whether two views of one memory show the same elements in the same order."""
    return a.shape == b.shape and a.stride() == b.stride() and a.storage_offset() == b.storage_offset()


def trace(value: Node, placeholder: Node) -> Trace | None:
    """The writes that make ``value`` out of ``placeholder``, or None when there is no such chain."""
    old = placeholder.meta["val"]
    if any(not isinstance(size, int) for size in old.shape):
        return None
    start = torch.empty_strided(tuple(old.shape), old.stride(), dtype=old.dtype, device="meta")
    found = Trace(placeholder, versions={placeholder: start})
    region = _walk(found, value, placeholder)
    return found if region is not None and found.writes and same_layout(region, start) else None


def _walk(found: Trace, node: Any, stop: Node) -> Tensor | None:
    """The memory that ``node`` denotes once the writes between ``stop`` and it happen in place; records them."""
    if node is stop:
        return found.versions[stop]
    if not isinstance(node, Node) or node in found.versions:
        return None
    if is_view(node):
        return _walk_view(found, node, stop)
    if node.target in SCATTERS:
        region = _walk_scatter(found, node, stop)
    elif node.target is operator.getitem and (call := functionalized_call(node.args[0])) is not None:
        index = int(str(node.args[1])) - call.results
        region = _walk(found, call.bases[index], stop) if index >= 0 else None
        found.writes += [Write("call", node)] if region is not None else []
    elif in_place_twin(node) is not None:
        region = _walk(found, node.args[0], stop)
        found.writes += [Write("twin", node)] if region is not None else []
    else:
        return None
    if region is not None:
        found.versions[node] = region
    return region


def _walk_view(found: Trace, node: Node, stop: Node) -> Tensor | None:
    region = _walk(found, node.args[0], stop)
    return None if region is None else view_of(region, node.target, node.args[1:])


def view_of(region: Tensor, target: Any, rest: tuple[Any, ...]) -> Tensor | None:
    """The view ``target(region, *rest)``, or None when the memory does not allow it or an argument is symbolic."""
    try:
        return target(region, *rest)
    except (RuntimeError, TypeError, ValueError):
        return None


def _walk_scatter(found: Trace, node: Node, stop: Node) -> Tensor | None:
    base, source = node.args[0], node.args[1]
    version = without_views(base)
    if _walk(found, version, stop) is None:
        return None
    region = _region_through(found, base, version)
    part = None if region is None else view_of(region, SCATTERS[node.target], node.args[2:])
    if part is None:
        return None
    inner = Trace(found.placeholder, versions={version: found.versions[version]})
    written = _walk(inner, source, version)
    if written is not None and inner.writes and same_layout(written, part):
        found.writes += [*inner.writes, Write("joined", node)]
        found.versions.update(inner.versions)
    else:
        found.writes.append(Write("copy", node))
    return region


def _region_through(found: Trace, node: Any, version: Node) -> Tensor | None:
    """The memory of a chain of views over ``version``."""
    if node is version:
        return found.versions[version]
    region = _region_through(found, node.args[0], version)
    return None if region is None else view_of(region, node.target, node.args[1:])
