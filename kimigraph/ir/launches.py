"""How many device operations a graph starts."""

from collections.abc import Mapping
from functools import cache

import torch
from torch._ops import OpOverload
from torch.fx import Graph, Node

from kimigraph.ir.operators import operator_of
from kimigraph.ir.purity import alias_source, mutated_arguments

_ATEN = torch.ops.aten
VIEWS_IF_POSSIBLE = frozenset((_ATEN.reshape.default, _ATEN.flatten.using_ints, _ATEN.reshape_as.default))
"""Operators that give a view where strides allow one, and copy where they do not."""


def graph_launches(graph: Graph, kernel_launches: Mapping[str, int] | None = None) -> int:
    """Calls of non-view ATen operators, plus kernel launches of semantic operators and regions.

    ``kernel_launches`` gives the launches of such a node by name; one that is absent (a graph without kernels yet)
    counts once. Views, item access and assertions on metadata start nothing on a device.
    """
    return sum(launches_of(node, kernel_launches) for node in graph.nodes)


def launches_of(node: Node, kernel_launches: Mapping[str, int] | None = None) -> int:
    """What one node adds to ``graph_launches``: nothing for a weight that is prepared when the program is bound."""
    if node.op == "call_module":
        return (kernel_launches or {}).get(node.name, 1)
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return 0
    if node.meta.get("prepared"):
        return 0
    if operator_of(node) is not None:
        return (kernel_launches or {}).get(node.name, 1)
    return 0 if is_view(node) or _only_asks(node.target) else 1


@cache
def _only_asks(target: OpOverload) -> bool:
    """Whether the operator asserts, or asks for a size: nothing runs on a device."""
    return any(part in str(target) for part in ("_assert_tensor_metadata", "sym_"))


def is_view(node: Node) -> bool:
    """Whether the call only gives its argument's storage another shape: no kernel runs."""
    if mutated_arguments(node) or alias_source(node) is None:
        return False
    source = next(iter(node.all_input_nodes), node)
    value, given = node.meta.get("val"), source.meta.get("val")
    if not isinstance(value, torch.Tensor) or not isinstance(given, torch.Tensor):
        return True
    if node.target in VIEWS_IF_POSSIBLE:
        return can_view(given, value.shape)
    if node.target is _ATEN.contiguous.default:
        return given.is_contiguous()
    # An operator that may alias (to, type_as) copies when the type changes; view.dtype is the one that does not.
    return value.dtype == given.dtype or node.target is _ATEN.view.dtype


def can_view(given: torch.Tensor, shape: torch.Size) -> bool:
    """Whether ``given`` can be seen in ``shape`` without a copy; True where sizes are symbolic."""
    if any(isinstance(size, torch.SymInt) for size in (*given.shape, *given.stride(), *shape)):
        return True
    try:
        torch.empty_strided(given.shape, given.stride(), dtype=given.dtype, device="meta").view(shape)
    except RuntimeError:
        return False
    return True
