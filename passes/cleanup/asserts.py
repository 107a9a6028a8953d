"""Assertions that the recorded shapes and dtypes already prove."""

from typing import Any

import torch
from torch.fx import Graph, Node

_METADATA = torch.ops.aten._assert_tensor_metadata.default
_SCALAR = torch.ops.aten._assert_scalar.default
_RANGES = (torch.ops.aten.sym_constrain_range.default, torch.ops.aten.sym_constrain_range_for_size.default)


def drop_metadata_asserts(graph: Graph) -> int:
    """Erase each ``_assert_tensor_metadata`` that holds by its argument's ``meta["val"]``; one that may fail stays."""
    provable = [node for node in graph.nodes if node.target is _METADATA and _metadata_holds(node)]
    for node in provable:
        graph.erase_node(node)
    return len(provable)


def drop_scalar_asserts(graph: Graph) -> int:
    """Erase each ``_assert_scalar`` of a true literal and each range constraint on a literal inside its range."""
    provable = [node for node in graph.nodes if _scalar_holds(node)]
    for node in provable:
        graph.erase_node(node)
    return len(provable)


def _metadata_holds(node: Node) -> bool:
    value = node.args[0].meta.get("val") if isinstance(node.args[0], Node) else None
    if not isinstance(value, torch.Tensor):
        return False
    size, stride, dtype = (
        _argument(node, position, name) for position, name in enumerate(("size", "stride", "dtype"), 1)
    )
    device, layout = node.kwargs.get("device"), node.kwargs.get("layout")
    return (
        (size is None or _same_sizes(size, value.shape))
        and (stride is None or _same_sizes(stride, value.stride()))
        and (dtype is None or dtype == value.dtype)
        and (device is None or _same_device(device, value.device))
        and (layout is None or layout == value.layout)
    )


def _same_sizes(wanted: Any, found: Any) -> bool:
    return len(wanted) == len(found) and all(
        type(w) is int and type(f) is int and w == f for w, f in zip(wanted, found, strict=True)
    )


def _same_device(wanted: Any, found: torch.device) -> bool:
    device = torch.device(wanted)
    return device.type == found.type and device.index in (None, found.index)


def _scalar_holds(node: Node) -> bool:
    if node.target is _SCALAR:
        return node.args[0] is True
    if node.target in _RANGES and type(node.args[0]) is int:
        low, high = (_argument(node, position, name) for position, name in ((1, "min"), (2, "max")))
        return (low is None or node.args[0] >= low) and (high is None or node.args[0] <= high)
    return False


def _argument(node: Node, position: int, name: str) -> Any:
    return node.args[position] if position < len(node.args) else node.kwargs.get(name)
