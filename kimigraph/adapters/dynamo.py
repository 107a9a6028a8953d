# pyright: basic
# Reason: what Dynamo hangs on its graphs (sources, reasons of breaks) is private and untyped.
"""Graphs of TorchDynamo: parameters and buffers become the graph's own, names become those of the model."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from keyword import iskeyword
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node

from kimigraph.ir.errors import CaptureError

_ATTRIBUTE = re.compile(r"\._(modules|parameters|buffers)\['([^']+)'\]")
_WORD = re.compile(r"\w+")


@dataclass(frozen=True)
class DynamoGraph:
    """One graph that Dynamo traced. ``held`` are the places of its parameters and buffers among its flat inputs, and
    their names in the model; ``free`` are the places of all other inputs."""

    module: GraphModule
    held: tuple[tuple[int, str], ...]
    free: tuple[int, ...]
    name: str
    reason: str
    """Why the graph ends where it does, with file and line; empty where it is the end of the function."""

    @property
    def computes(self) -> bool:
        """Whether the graph does anything but hand inputs on."""
        return any(node.op.startswith("call") for node in self.module.graph.nodes)

    def bound_to(self, tensors: Sequence[torch.Tensor]) -> GraphModule:
        """The graph as a module that owns ``tensors``, one for each of ``held``; it takes the free inputs."""
        names = dict(self.held)
        root = nn.Module()
        for (_, name), tensor in zip(self.held, tensors, strict=True):
            _place(root, name.split("."), tensor)
        for name, value in [*self.module.named_buffers(recurse=False), *self.module.named_children()]:
            setattr(root, name, value)
        graph, remap = Graph(), dict[Node, Node]()
        taken: set[str] = set()
        for place, node in enumerate(self.module.graph.nodes):
            if node.op == "placeholder":
                held = place in names
                remap[node] = graph.get_attr(names[place]) if held else graph.placeholder(_argument_name(node, taken))
            elif node.target is not torch._C._set_grad_enabled:  # programs run without gradients throughout
                remap[node] = graph.node_copy(node, lambda old: remap[old])
        return GraphModule(root, graph, class_name=self.name)


def read_graph(module: GraphModule, inputs: Sequence[Any]) -> DynamoGraph:
    """Take apart what Dynamo hands to a backend. CaptureError where parameters come after the body has begun."""
    held: list[tuple[int, str]] = []
    free: list[int] = []
    taken: set[str] = set()
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    if list(module.graph.nodes)[: len(placeholders)] != placeholders:
        raise CaptureError("a graph of TorchDynamo has inputs after its first operator: this torch is not supported")
    for place, (node, value) in enumerate(zip(placeholders, inputs, strict=True)):
        path = _ATTRIBUTE.findall(_source(node))
        if path and path[-1][0] != "modules" and isinstance(value, torch.Tensor):
            held.append((place, _unused(".".join(name for _, name in path), taken)))
        else:
            free.append(place)
    return DynamoGraph(module, tuple(held), tuple(free), _name(module), _break(module))


def _source(node: Node) -> str:
    """The Python expression that Dynamo reads an input from, such as ``L['self']._parameters['weight']``."""
    source = getattr(node, "_dynamo_source", None) or getattr(node.meta.get("grapharg"), "source", None)
    name = getattr(source, "name", "")
    return str(name() if callable(name) else name)


def _unused(name: str, taken: set[str]) -> str:
    """``name``, numbered when another module of the same graph has it, or holds names below it."""
    while name in taken or any(other.startswith(f"{name}.") or name.startswith(f"{other}.") for other in taken):
        name += "_"
    taken.add(name)
    return name


def _argument_name(node: Node, taken: set[str]) -> str:
    """What the model calls a free input, as an identifier: ``past_key_values_layers_0_keys``."""
    words = [word for word in _WORD.findall(_source(node)) if word not in ("L", "G")]
    name = "_".join(words).strip("_") or node.name
    return _unused(name if name.isidentifier() and not iskeyword(name) else f"input_{name}", taken)


def _name(module: GraphModule) -> str:
    """The class of the outermost module that Dynamo met on its way, as an identifier."""
    stacks = (node.meta.get("nn_module_stack") for node in module.graph.nodes)
    outer = next((next(iter(stack.values()))[1] for stack in stacks if stack), "function")
    return re.sub(r"\W", "_", getattr(outer, "__name__", str(outer)).rpartition(".")[2])


def _break(module: GraphModule) -> str:
    reason: Any = getattr(module, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break:
        return ""
    frames = [f"{frame.filename}:{frame.lineno}" for frame in reason.user_stack[-1:]]
    return " at ".join([str(reason.reason).strip().partition("\n")[0], *frames])


def _place(root: nn.Module, path: list[str], tensor: torch.Tensor) -> None:
    for name in path[:-1]:
        if not hasattr(root, name):
            root.add_module(name, nn.Module())
        root = getattr(root, name)
    if isinstance(tensor, nn.Parameter):
        root.register_parameter(path[-1], tensor)
    else:
        root.register_buffer(path[-1], tensor)


def register_backend() -> None:
    """Name the backend to a torch that may have looked for backends before it could find this one."""
    from torch._dynamo.backends import registry

    if "kimigraph" not in registry._BACKENDS and "kimigraph" not in registry._COMPILER_FNS:
        registry.register_backend(_backend, name="kimigraph")


def _backend(module: GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
    backend: Any = import_module("kimigraph.torch_compile").backend
    return backend(module, inputs, **options)
