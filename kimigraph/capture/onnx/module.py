"""A checked ONNX file as a module of ATen operators: states are updated in place at the end of its step."""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from inspect import Parameter, Signature
from keyword import iskeyword
from operator import getitem
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, Interpreter, Node
from torch.fx.traceback import preserve_node_meta

from kimigraph.adapters.onnx_file import FileFunction, FileNode, FilePort, Foreign, OnnxFile, Reference, StoredTensor
from kimigraph.capture.onnx.audit import size_fault
from kimigraph.capture.onnx.builder import ATEN, Builder, Value
from kimigraph.capture.onnx.call import Call, Handler
from kimigraph.capture.onnx.external import read_stored
from kimigraph.capture.onnx.indexing import INDEXING
from kimigraph.capture.onnx.layout import LAYOUT
from kimigraph.capture.onnx.pointwise import POINTWISE
from kimigraph.capture.onnx.products import PRODUCTS
from kimigraph.capture.onnx.semantic import call_operator, operator_named
from kimigraph.capture.versions import is_view
from kimigraph.ir import purity
from kimigraph.ir.errors import CaptureError, KimigraphError, UsageError
from kimigraph.ir.onnx_format import DOMAIN

TABLE: dict[str, Handler] = {**POINTWISE, **LAYOUT, **INDEXING, **PRODUCTS}
OF_TORCH = ("pytorch", "kimigraph")
"""Producers that write out the operators of torch: their TopK was ``torch.topk``."""


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
    scope |= _weights(build, file)
    walk = _Walk(build, file, scope, {value.node for value in held.values() if value.node is not None})
    walk.run(file.nodes, scope, {}, file.opsets[""], [port.name for port in file.outputs])
    finals = {name: scope[output] for name, output in states.items()}
    results = [scope[port.name] for port in file.outputs if port.name not in states.values()]
    kept = _apart(build, [*finals.values(), *results], held, finals)
    for name, value in zip(finals, kept[: len(finals)], strict=True):
        if value.node is not held[name].node:
            build.graph.call_function(ATEN.copy_.default, (held[name].node, build.node_of(value)))
    _gather_states(build.graph, held)
    build.graph.output(tuple(build.node_of(value) for value in kept[len(finals) :]))
    return OnnxModule(build, [*inputs.plain, *(["cache"] if inputs.states else [])]).eval()


def held_weights(file: OnnxFile) -> dict[str, torch.Tensor]:
    """The parameters of the module that ``file`` becomes, whatever its sizes are."""
    build = Builder()
    _weights(build, file)
    return dict(build.root.named_parameters())


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


def _right_operands(file: OnnxFile) -> set[str]:
    """The names that are nothing but right operands of products."""
    right: set[str] = set()
    others = {port.name for port in file.outputs}
    for node in file.nodes:
        product = node.op == "MatMul" and not node.domain
        others.update(node.inputs[:1] if product else node.inputs)
        right.update(node.inputs[1:] if product else ())
    return right - others


def _weights(build: Builder, file: OnnxFile) -> dict[str, Value]:
    right = _right_operands(file)
    return {tensor.name: _weight(build, file, tensor, tensor.name in right) for tensor in file.weights}


def _weight(build: Builder, file: OnnxFile, tensor: StoredTensor, turned: bool) -> Value:
    """A parameter; integers, truths and numbers are known, and what exporters fill with one number: such a tensor has
    none of a model's dotted names.

    One that products have on their right is kept [out, in], as models keep it.
    """
    values = read_stored(file.path, tensor)
    filled = "." not in tensor.name and bool((values == values.flatten()[:1]).all())
    if not values.is_floating_point() or values.numel() == 1 or filled:
        return build.constant(values)
    if turned and values.dim() == 2:
        return build.call(ATEN.transpose.int, build.weight(tensor.name, values.t().contiguous()), 0, 1)
    return build.weight(tensor.name, values)


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


class _Walk:
    """Translates nodes in order; functions that are no operators stand where they are called.

    ``scope`` has the values of the graph by name; ``states`` are the nodes of those that a step updates.
    """

    def __init__(self, build: Builder, file: OnnxFile, scope: dict[str, Value], states: Collection[Node]) -> None:
        self.build, self.file, self._scope, self._states = build, file, scope, states
        self._functions = {(item.domain, item.name): item for item in self.file.functions}
        self._from_torch = self.file.producer in OF_TORCH
        self._places: dict[int, int] = {}

    def run(
        self,
        nodes: Sequence[FileNode],
        scope: dict[str, Value],
        given: Mapping[str, Any],
        opset: int,
        results: Iterable[str],
    ) -> None:
        """Translate ``nodes``; ``given`` are the attributes of the call that they stand for."""
        top = scope is self._scope
        left = Counter([*results, *(name for node in nodes for name in node.inputs)])
        for node in nodes:
            left.subtract(node.inputs)
            operands = tuple(scope[name] if name else None for name in node.inputs)
            attributes = self._attributes(node, given)
            self.build.title, self.build.meta = node.title, self._origin(node)
            function = self._functions.get((node.domain, node.op))

            def may_write(place: int, operands: tuple[Value | None, ...] = operands) -> bool:
                return top and self._is_free(operands, place, {n: v for n, v in scope.items() if left[n] > 0})

            call = Call(self.build, node, operands, attributes, opset, self._from_torch, may_write)
            values = self._translated(call, function)
            scope.update({name: value for name, value in zip(node.outputs, values, strict=False) if name})
            if missing := [name for name in node.outputs[len(values) :] if name]:
                raise call.refused(f"has no output '{missing[0]}' in its translation")

    def _is_free(self, operands: tuple[Value | None, ...], place: int, read_later: Mapping[str, Value]) -> bool:
        """Whether an operand is a state that may change now: under no name, and through no view, it is read later."""
        value = operands[place]
        node = None if value is None else value.node
        if node is None or node not in self._states:
            return False
        others = [other.node for number, other in enumerate(operands) if other is not None and number != place]
        return (
            not any(v.node is node for v in read_later.values())
            and node not in others
            and not any(is_view(user) for user in node.users)
        )

    def _origin(self, node: FileNode) -> dict[str, Any]:
        """Where a node stands, as torch tells it of code: the file and the node, and the modules that exporters say."""
        place = self._places.setdefault(id(node), len(self._places) + 1)
        trace = f'File "{self.file.path}", line {place}, in {node.title}'
        scopes = {f"scope {number}": (path, "") for number, path in enumerate(node.scopes)}
        return {"stack_trace": trace, "nn_module_stack": scopes} if scopes else {"stack_trace": trace}

    def _attributes(self, node: FileNode, given: Mapping[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, value in node.attributes.items():
            if isinstance(value, Reference):
                if value.name in given:
                    found[name] = given[value.name]
            else:
                found[name] = read_stored(self.file.path, value) if isinstance(value, StoredTensor) else value
        return found

    def _translated(self, call: Call, function: FileFunction | None) -> tuple[Value, ...]:
        node = call.node
        if function is None:
            try:
                result = TABLE[node.op](call)
            except KimigraphError:
                raise
            except Exception as error:  # a node may have any operands and attributes, whatever its operator takes
                raise call.refused(f"is not as the standard has it ({type(error).__name__}: {error})") from error
            return result if isinstance(result, tuple) else (result,)
        operator = operator_named(function.name, function.inputs) if function.domain == DOMAIN else None
        if operator is not None:
            return call_operator(call, operator, function.inputs)
        inner = dict(zip(function.inputs, (value for value in call.operands), strict=False))
        scope = {name: value for name, value in inner.items() if value is not None}
        self.run(function.nodes, scope, call.attributes, function.opset or call.opset, function.outputs)
        return tuple(scope[name] for name in function.outputs)


def require_operators(file: OnnxFile) -> None:
    """CaptureError that lists all operators of ``file`` without a translation, with their domains and nodes."""
    functions = {(item.domain, item.name): item for item in file.functions}
    missing: dict[str, list[str]] = {}
    seen: set[tuple[str, str]] = set()
    pending: list[tuple[str, Iterable[FileNode]]] = [("", file.nodes)]
    while pending:
        where, nodes = pending.pop()
        for node in nodes:
            key = (node.domain, node.op)
            function = functions.get(key)
            if function is not None:
                known = function.domain == DOMAIN and operator_named(function.name, function.inputs) is not None
                if not known and key not in seen:
                    seen.add(key)
                    pending.append((f" in {function.name}", function.nodes))
            elif node.domain or node.op not in TABLE or _has_graph(node):
                missing.setdefault(f"{node.domain or 'ai.onnx'}::{node.op}", []).append(f"'{node.title}'{where}")
    if missing:
        lines = [
            f"{name}: {', '.join(titles[:4])}{f' and {len(titles) - 4} more' if len(titles) > 4 else ''}"
            for name, titles in sorted(missing.items())
        ]
        raise CaptureError(
            f"{file.path}: {len(lines)} operators have no translation. {'; '.join(lines)}. Export the model without "
            "them, or give the model itself as package.module:function"
        )


def _has_graph(node: FileNode) -> bool:
    return any(isinstance(value, Foreign) for value in node.attributes.values())
