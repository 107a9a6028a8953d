"""A checked ONNX file as a module of ATen operators: states are updated in place at the end of its step."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from inspect import Parameter, Signature
from keyword import iskeyword
from operator import getitem
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, Interpreter
from torch.fx.traceback import preserve_node_meta

from kimigraph.adapters.onnx_file import FilePort, OnnxFile
from kimigraph.capture.onnx.audit import size_fault
from kimigraph.capture.onnx.builder import ATEN, Builder, Value
from kimigraph.capture.onnx.walk import Walk, require_operators
from kimigraph.capture.onnx.weights import hold_weights
from kimigraph.ir import purity
from kimigraph.ir.errors import UsageError


@dataclass(frozen=True)
class Inputs:
    """What the module takes: ``plain`` by position, ``states`` in a dict behind them, each a parameter's name and the
    file's port with numbers for sizes."""

    plain: dict[str, FilePort]
    states: dict[str, FilePort]


def input_ports(file: OnnxFile, states: Mapping[str, str], sizes: Mapping[str, int]) -> Inputs:
    """The inputs of ``file`` as arguments. UsageError that lists all sizes that are names and not in ``sizes``."""
    held = {tensor.name for tensor in file.weights}
    missing: set[str] = set()
    ports: list[FilePort] = []
    for port in file.inputs:
        if port.name in held:
            continue
        if port.shape is None:
            raise UsageError(f"{file.path}: input '{port.name}' has no shape; export it with one")
        missing |= {str(size) for size in port.shape if isinstance(size, str) and size not in sizes}
        shape = tuple(size if isinstance(size, int) else sizes.get(size, 1) for size in port.shape)
        assert port.dtype is not None
        if fault := size_fault(shape, port.dtype.itemsize):
            raise UsageError(f"{file.path}: input '{port.name}' {fault}")
        ports.append(FilePort(port.name, port.dtype, port.kind, shape, port.note))
    if missing:
        names = ", ".join(sorted(name or "(without a name)" for name in missing))
        example = next((name for name in sorted(missing) if name), "NAME")
        raise UsageError(
            f"{file.path} leaves sizes open: {names}. A program is for fixed sizes: give each, as in --set {example}=1"
        )
    taken: set[str] = set()
    plain = {_identifier(port.name, taken): port for port in ports if port.name not in states}
    return Inputs(plain, {port.name: port for port in ports if port.name in states})


def _identifier(name: str, taken: set[str]) -> str:
    word = re.sub(r"\W+", "_", name).strip("_") or "input"
    word = f"input_{word}" if not word.isidentifier() or iskeyword(word) or word in ("self", "cache") else word
    while word in taken:
        word += "_"
    taken.add(word)
    return word


def build_module(file: OnnxFile, inputs: Inputs, states: Mapping[str, str]) -> nn.Module:
    """The module ``forward(*plain, cache) -> tuple of results``, without the outputs that are states' new values.

    Raises CaptureError that lists every operator without a translation, or names the node that cannot be.
    """
    require_operators(file)
    build = Builder()
    scope: dict[str, Value] = {}
    for name, port in inputs.plain.items():
        scope[port.name] = build.placeholder(name, _numbers(port), _dtype(port))
    held: dict[str, Value] = {}
    for number, (name, port) in enumerate(inputs.states.items()):
        held[name] = build.placeholder(f"state_{number}", _numbers(port), _dtype(port))
    scope |= held
    weights, below = hold_weights(build, file)
    scope |= weights
    walk = Walk(build, file, scope, {value.node for value in held.values() if value.node is not None}, below)
    walk.run(file.nodes, scope, {}, file.opsets[""], [port.name for port in file.outputs])
    finals = {name: scope[output] for name, output in states.items()}
    results = [scope[port.name] for port in file.outputs if port.name not in states.values()]
    kept = _apart(build, [*finals.values(), *results], held, finals)
    for name, value in zip(finals, kept[: len(finals)], strict=True):
        if value.node is not held[name].node:
            build.graph.call_function(ATEN.copy_.default, (held[name].node, build.node_of(value)))
    _gather_states(build.graph, held)
    build.graph.output(tuple(build.node_of(value) for value in kept[len(finals) :]))
    for node in reversed(build.graph.nodes):  # places of a mask, for one, of which the mask itself took the place
        if node.op == "call_function" and not node.users and purity.is_pure(node):
            build.graph.erase_node(node)
    return OnnxModule(build, [*inputs.plain, *(["cache"] if inputs.states else [])]).eval()


class OnnxModule(nn.Module):
    """Runs the graph node by node, so that whoever traces it learns which node of the file each operator comes from."""

    def __init__(self, build: Builder, parameters: Sequence[str]) -> None:
        super().__init__()
        for name, part in build.root.named_children():
            self.add_module(name, part)
        for name, parameter in build.root.named_parameters(recurse=False):
            self.register_parameter(name, parameter)
        for name, constant in build.root.named_buffers(recurse=False):
            self.register_buffer(name, constant, persistent=False)
        vars(self)["graph"] = build.graph
        signature = Signature([Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in parameters])

        def forward(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
            given = signature.bind(*args, **kwargs).arguments
            with preserve_node_meta():
                return Interpreter(self, graph=build.graph).run(*(given[name] for name in parameters))

        vars(forward)["__signature__"] = signature
        vars(self)["forward"] = forward


def _numbers(port: FilePort) -> tuple[int, ...]:
    assert port.shape is not None
    return tuple(int(size) for size in port.shape)


def _dtype(port: FilePort) -> torch.dtype:
    assert port.dtype is not None
    return port.dtype


def _gather_states(graph: Graph, held: Mapping[str, Value]) -> None:
    """Make the states items of one dict, the last argument, so that they keep their names."""
    if not held:
        return
    nodes = [value.node for value in held.values() if value.node is not None]
    with graph.inserting_before(nodes[0]):
        cache = graph.placeholder("cache")
    for name, node in zip(held, nodes, strict=True):
        with graph.inserting_after(nodes[-1]):
            item = graph.call_function(getitem, (cache, name))
        node.replace_all_uses_with(item)
    for node in nodes:
        graph.erase_node(node)


def _apart(build: Builder, values: list[Value], held: dict[str, Value], finals: dict[str, Value]) -> list[Value]:
    """The values with copies of those that show the old value of a state, before any state is written at the end."""
    written = {value.node: finals[name].node for name, value in held.items()}
    kept: list[Value] = []
    for place, value in enumerate(values):
        root = None if value.node is None else purity.storage_root(value.node)
        own = place < len(finals) and root is value.node and value.node is list(held.values())[place].node
        unwritten = root is not None and written.get(root) is root
        shows = root in written and not own and not unwritten
        kept.append(build.call(ATEN.clone.default, value) if shows else value)
    return kept
