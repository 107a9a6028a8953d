"""What makes two graphs the same: cheap to take, so that the manager can hold a pass to what it says it did."""

from collections.abc import Iterator
from operator import is_
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
    return GraphState(graph_module).fingerprint()


class GraphState:
    """What a graph was: its nodes with their targets and arguments, as they are now.

    Taking it costs a walk over the nodes, and so does comparing one with the next where nothing changed: arguments are
    never changed in place, so that those which are the same objects are equal. Only others are compared by content.
    """

    def __init__(self, graph_module: GraphModule) -> None:
        self.nodes = [(node, node.op, node.target, node.args, node.kwargs) for node in graph_module.graph.nodes]
        called = [target for _, op, target, _, _ in self.nodes if op == "call_module"]
        children = {str(target): graph_module.get_submodule(str(target)) for target in called}
        self.children = {
            name: GraphState(child) if isinstance(child, GraphModule) else child for name, child in children.items()
        }

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, GraphState):
            return NotImplemented
        return self.is_unchanged(other) or self.fingerprint() == other.fingerprint()

    def fingerprint(self) -> Fingerprint:
        """A value that equals that of every equal graph, made of other nodes too."""
        position = {entry[0]: index for index, entry in enumerate(self.nodes)}
        return tuple(self._keys(position))

    def _keys(self, position: dict[Node, int]) -> Iterator[Fingerprint]:
        for _, op, target, args, kwargs in self.nodes:
            key = self._child_key(str(target)) if op == "call_module" else target
            try:
                yield op, key, argument_key(args, position), argument_key(kwargs, position)
            except KeyError:
                yield op, key, "dangling", "dangling"

    def _child_key(self, name: str) -> Any:
        child = self.children[name]
        return child.fingerprint() if isinstance(child, GraphState) else (name, id(child))

    def is_unchanged(self, other: "GraphState") -> bool:
        """Whether both are states of one graph whose nodes nobody touched in between: cheap, by identity alone."""
        return (
            len(self.nodes) == len(other.nodes)
            and all(all(map(is_, mine, theirs)) for mine, theirs in zip(self.nodes, other.nodes, strict=True))
            and self.children.keys() == other.children.keys()
            and all(_are_same(child, other.children[name]) for name, child in self.children.items())
        )


def _are_same(child: Any, other: Any) -> bool:
    if isinstance(child, GraphState):
        return isinstance(other, GraphState) and child.is_unchanged(other)
    return child is other


def interface_fingerprint(graph_module: GraphModule) -> Fingerprint:
    """Placeholders by name, order, shape and dtype, and outputs by number, shape and dtype: no pass may change them."""
    placeholders = [node for node in graph_module.graph.nodes if node.op == "placeholder"]
    outputs = [node for node in graph_module.graph.nodes if node.op == "output"]
    counts = tuple(len(node.args[0]) if isinstance(node.args[0], list | tuple) else 1 for node in outputs)
    return tuple((node.name, _tensor_key(node)) for node in placeholders), counts, tuple(_output_keys(outputs))


def _tensor_key(node: Node) -> Any:
    value = node.meta.get("val")
    return (tuple(str(size) for size in value.shape), str(value.dtype)) if isinstance(value, torch.Tensor) else None


def _output_keys(outputs: "list[Node]") -> list[Any]:
    return [_tensor_key(source) for output in outputs for source in output.all_input_nodes]
