"""What makes two graphs the same: cheap to take, so that the manager can hold a pass to what it says it did."""

from typing import Any

import torch
from torch.fx import GraphModule, Node

Fingerprint = tuple[Any, ...]


def literal_key(value: Any) -> tuple[str, str]:
    """A literal by type and bits: 0 is not 0.0, 0.0 is not -0.0, and nan is nan."""
    return type(value).__name__, value.hex() if isinstance(value, float) else repr(value)


def argument_key(argument: Any, key_of: "dict[Node, Any]") -> Any:
    """A hashable form of a node's argument; nodes stand as ``key_of`` has them, literals by type and bits."""
    if isinstance(argument, Node):
        return "node", key_of[argument]
    if isinstance(argument, list | tuple):
        return type(argument).__name__, tuple(argument_key(item, key_of) for item in argument)
    if isinstance(argument, dict):
        return "dict", tuple((key, argument_key(item, key_of)) for key, item in argument.items())
    if isinstance(argument, slice):
        return "slice", tuple(argument_key(item, key_of) for item in (argument.start, argument.stop, argument.step))
    return literal_key(argument)


def graph_fingerprint(graph_module: GraphModule) -> Fingerprint:
    """Operators, arguments and order, without names and metadata; regions (child graphs) count by their content."""
    position = {node: index for index, node in enumerate(graph_module.graph.nodes)}
    return tuple(
        (
            node.op,
            _target_key(graph_module, node),
            argument_key(node.args, position) if _known(node, position) else "dangling",
            argument_key(node.kwargs, position) if _known(node, position) else "dangling",
        )
        for node in graph_module.graph.nodes
    )


def interface_fingerprint(graph_module: GraphModule) -> Fingerprint:
    """Placeholders by name, order, shape and dtype, and outputs by number, shape and dtype: no pass may change them."""
    placeholders = [node for node in graph_module.graph.nodes if node.op == "placeholder"]
    outputs = [node for node in graph_module.graph.nodes if node.op == "output"]
    counts = tuple(len(node.args[0]) if isinstance(node.args[0], list | tuple) else 1 for node in outputs)
    return tuple((node.name, _tensor_key(node)) for node in placeholders), counts, tuple(_output_keys(outputs))


def _known(node: Node, position: "dict[Node, int]") -> bool:
    return all(source in position for source in node.all_input_nodes)


def _target_key(graph_module: GraphModule, node: Node) -> Any:
    if node.op == "call_module":
        child = graph_module.get_submodule(str(node.target))
        return graph_fingerprint(child) if isinstance(child, GraphModule) else (str(node.target), id(child))
    return node.target


def _tensor_key(node: Node) -> Any:
    value = node.meta.get("val")
    return (tuple(str(size) for size in value.shape), str(value.dtype)) if isinstance(value, torch.Tensor) else None


def _output_keys(outputs: "list[Node]") -> list[Any]:
    return [_tensor_key(source) for output in outputs for source in output.all_input_nodes]
