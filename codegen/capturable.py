"""Which nodes no CUDA graph can hold: those for which the host waits for a value."""

import torch
from torch._ops import OpOverload
from torch.fx import Graph, Node

from kimigraph.ir.schemas import argument, nodes_in

_ATEN = torch.ops.aten
_INDEXED = frozenset((_ATEN.index.Tensor, _ATEN.index_put.default, _ATEN.index_put_.default))


def uncapturable(graph: Graph) -> dict[str, str]:
    """The nodes of ``graph`` that wait for the device, each with the reason, in words that go on from its name."""
    found = {node.name: _reason(node) for node in graph.nodes}
    return {name: reason for name, reason in found.items() if reason}


def _reason(node: Node) -> str:
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return ""
    if node.target in _INDEXED:
        masked = any(_is_mask(index) for index in nodes_in(argument(node, "indices")))
        return "indexes by a mask, which the host makes a list of (where() and masked_fill() do not)" if masked else ""
    if torch.Tag.data_dependent_output in node.target.tags:
        return "hands a value of the device to the host"
    if torch.Tag.dynamic_output_shape in node.target.tags and not _has_known_size(node):
        return "has a result of which the shape depends on values"
    return ""


def _has_known_size(node: Node) -> bool:
    """``repeat_interleave`` needs not count when it is told how much comes out."""
    return node.target is _ATEN.repeat_interleave.Tensor and argument(node, "output_size") is not None


def _is_mask(index: Node) -> bool:
    value = index.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dtype in (torch.bool, torch.uint8)
