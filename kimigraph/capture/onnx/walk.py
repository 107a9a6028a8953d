"""Translates the nodes of an ONNX file in order; functions and graphs stand where they are called or held."""

from collections import ChainMap, Counter
from collections.abc import Collection, Iterable, Mapping, MutableMapping, Sequence
from typing import Any

from torch.fx import Node

from kimigraph.adapters.onnx_file import FileGraph, FileNode, Foreign, OnnxFile, Reference, StoredTensor
from kimigraph.capture.onnx.audit import MOST_NODES
from kimigraph.capture.onnx.builder import Builder, Value
from kimigraph.capture.onnx.call import Call, Handler
from kimigraph.capture.onnx.control import CONTROL, MOST_UNROLLED
from kimigraph.capture.onnx.external import read_stored
from kimigraph.capture.onnx.indexing import INDEXING
from kimigraph.capture.onnx.joining import JOINING
from kimigraph.capture.onnx.layout import LAYOUT
from kimigraph.capture.onnx.pointwise import POINTWISE
from kimigraph.capture.onnx.products import PRODUCTS
from kimigraph.capture.onnx.semantic import call_operator, operator_named
from kimigraph.capture.onnx.size_lists import SIZE_LISTS, computes_sizes
from kimigraph.capture.versions import is_view
from kimigraph.ir.errors import CaptureError, KimigraphError
from kimigraph.ir.onnx_format import DOMAIN
from kimigraph.ir.open_sizes import OpenSizeError

TABLE: dict[str, Handler] = {**POINTWISE, **LAYOUT, **JOINING, **INDEXING, **PRODUCTS}
OF_TORCH = ("pytorch", "kimigraph")
"""Producers that write out the operators of torch: their TopK was ``torch.topk``."""

Names = MutableMapping[str, Value]


class Walk:
    """The walk over one file.

    ``scope`` has the values of the graph by name, ``states`` are the nodes of those that a step updates, ``below`` the
    weights of graphs that are attributes, by the graph's ``id``.
    """

    def __init__(
        self,
        build: Builder,
        file: OnnxFile,
        scope: Names,
        states: Collection[Node],
        below: Mapping[int, Mapping[str, Value]],
    ) -> None:
        self.build, self.file, self._scope, self._states, self._below = build, file, scope, states, below
        self._functions = {(item.domain, item.name): item for item in self.file.functions}
        self._from_torch = self.file.producer in OF_TORCH
        self._places: dict[int, int] = {}
        self._translations, self._unrolled, self._depth = 0, 0, 0

    def run(
        self,
        nodes: Sequence[FileNode],
        scope: Names,
        given: Mapping[str, Any],
        opset: int,
        results: Iterable[str],
    ) -> None:
        """Translate ``nodes``; ``given`` are the attributes of the call that they stand for."""
        top = scope is self._scope
        left = Counter([*results, *(name for node in nodes for name in node.reads)])
        for node in nodes:
            left.subtract(node.reads)
            operands = tuple(scope[name] if name else None for name in node.inputs)
            attributes = self._attributes(node, given)
            self._count(node)

            def may_write(place: int, operands: tuple[Value | None, ...] = operands) -> bool:
                return top and self._is_free(operands, place, {n: v for n, v in scope.items() if left[n] > 0})

            call = Call(self.build, node, operands, attributes, opset, self._from_torch, may_write)
            values = self._translated(call, scope, given)
            scope.update({name: value for name, value in zip(node.outputs, values, strict=False) if name})
            if missing := [name for name in node.outputs[len(values) :] if name]:
                raise call.refused(f"has no output '{missing[0]}' in its translation")

    def _count(self, node: FileNode) -> None:
        self._translations += 1
        self._unrolled += self._depth > 0
        if self._translations > MOST_NODES:
            raise CaptureError(f"{self.file.path} becomes more than {MOST_NODES} nodes, at '{node.title}'")
        if self._unrolled > MOST_UNROLLED:
            raise CaptureError(
                f"{self.file.path}: the loops become more than {MOST_UNROLLED} nodes where they are unrolled, at "
                f"'{node.title}'. Programs have no loops: export it for fewer tokens"
            )
        self.build.title, self.build.meta = node.title, self._origin(node)

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

    def _translated(self, call: Call, scope: Names, given: Mapping[str, Any]) -> tuple[Value, ...]:
        node = call.node
        function = self._functions.get((node.domain, node.op))
        if function is None:
            try:
                result = self._standard(call, scope, given)
            except KimigraphError:
                raise
            except OpenSizeError as error:
                raise call.refused(str(error)) from error
            except Exception as error:  # a node may have any operands and attributes, whatever its operator takes
                raise call.refused(f"is not as the standard has it ({type(error).__name__}: {error})") from error
            return result if isinstance(result, tuple) else (result,)
        operator = operator_named(function.name, function.inputs) if function.domain == DOMAIN else None
        if operator is not None:
            return call_operator(call, operator, function.inputs)
        pairs = zip(function.inputs, call.operands, strict=False)
        inner = {name: value for name, value in pairs if value is not None}
        self.run(function.nodes, inner, call.attributes, function.opset or call.opset, function.outputs)
        return tuple(inner[name] for name in function.outputs)

    def _standard(self, call: Call, scope: Names, given: Mapping[str, Any]) -> Any:
        if call.node.op in CONTROL:
            return CONTROL[call.node.op](call, lambda graph, values: self._graph(graph, values, call, scope, given))
        return (SIZE_LISTS if computes_sizes(call) else TABLE)[call.node.op](call)

    def _graph(
        self, graph: FileGraph, values: Sequence[Value], call: Call, scope: Names, given: Mapping[str, Any]
    ) -> tuple[Value, ...]:
        """The results of a graph that is an attribute, for these inputs: it reads what is known around it."""
        if len(values) != len(graph.inputs):
            raise call.refused(f"gives {len(values)} values to a graph of {len(graph.inputs)} inputs")
        own: dict[str, Value] = {**self._below.get(id(graph), {}), **dict(zip(graph.inputs, values, strict=True))}
        inner: Names = ChainMap(own, scope)
        self._depth += 1
        self.run(graph.nodes, inner, given, call.opset, graph.outputs)
        self._depth -= 1
        self.build.title, self.build.meta = call.node.title, self._origin(call.node)
        return tuple(inner[name] for name in graph.outputs)


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
            pending += [(f" in {node.title}", graph.nodes) for graph in node.graphs.values()]
            if function is not None:
                known = function.domain == DOMAIN and operator_named(function.name, function.inputs) is not None
                if not known and key not in seen:
                    seen.add(key)
                    pending.append((f" in {function.name}", function.nodes))
            elif not _is_known(node):
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


def _is_known(node: FileNode) -> bool:
    if node.domain or any(isinstance(value, Foreign) for value in node.attributes.values()):
        return False
    return node.op in CONTROL or (node.op in TABLE and not node.graphs)
