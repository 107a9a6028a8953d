"""Views, casts and copies that hand on what they get."""

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph, Node

from kimigraph.ir.purity import is_pure
from kimigraph.passes.cleanup.storage import StorageFacts
from kimigraph.passes.gate import allow_all

_ATEN = torch.ops.aten
_PADS: frozenset[Any] = frozenset((_ATEN.pad.default, _ATEN.constant_pad_nd.default))

_ALIASING: frozenset[Any] = frozenset(
    (
        _ATEN.view.default,
        _ATEN.reshape.default,
        _ATEN._unsafe_view.default,
        _ATEN.expand.default,
        _ATEN.alias.default,
        _ATEN.detach.default,
        _ATEN.squeeze.default,
        _ATEN.squeeze.dim,
        _ATEN.squeeze.dims,
        _ATEN.transpose.int,
        _ATEN.permute.default,
        _ATEN.slice.Tensor,
        _ATEN.contiguous.default,
        _ATEN.to.dtype,
        _ATEN.to.device,
        _ATEN.to.dtype_layout,
        _ATEN.dropout.default,
    )
)
"""Operators that return their first argument's memory, unmoved, when shape, strides, dtype and device stay."""

_COPYING: frozenset[Any] = frozenset((_ATEN._to_copy.default, _ATEN.clone.default, *_PADS))
"""Operators that return the same values in new memory when shape, strides, dtype and device stay."""


def drop_no_ops(graph: Graph, allow: Callable[[str], bool] = allow_all) -> int:
    """Take out views and copies that change nothing; returns how many went.

    A node that is itself an output stays, so that outputs stay distinct objects. A copy stays when its storage or its
    source's is written behind it, or when it leaves the graph: there the copy is what keeps two values apart.
    """
    facts = StorageFacts.of(graph)
    dropped = 0
    for node in list(graph.nodes):
        source = _source_of_no_op(node)
        if source is None or node in facts.outputs:
            continue
        if node.target in _COPYING and _copy_matters(node, source, facts):
            continue
        if not allow(f"drop {node.name}, which hands on {source.name}"):
            continue
        node.replace_all_uses_with(source)
        graph.erase_node(node)
        dropped += 1
    return dropped


def _source_of_no_op(node: Node) -> Node | None:
    if node.op != "call_function" or not (node.target in _ALIASING or node.target in _COPYING) or not is_pure(node):
        return None
    source = node.args[0] if node.args else None
    if not isinstance(source, Node) or (node.target in _PADS and not _pads_nothing(node)):
        return None
    layout = _layout(node.meta.get("val"))
    return source if layout is not None and layout == _layout(source.meta.get("val")) else None


def _pads_nothing(node: Node) -> bool:
    """Whether all widths are 0: padding by -1 and 1 keeps the shape and moves the elements."""
    widths = node.args[1]
    return isinstance(widths, list | tuple) and all(type(width) is int and width == 0 for width in widths)


def _layout(value: Any) -> tuple[Any, ...] | None:
    if not isinstance(value, torch.Tensor) or any(type(size) is not int for size in (*value.shape, *value.stride())):
        return None
    return tuple(value.shape), value.stride(), value.dtype, value.device


def _copy_matters(node: Node, source: Node, facts: StorageFacts) -> bool:
    return facts.written_after(source, node) or facts.written_after(node, node) or facts.escapes(node)
