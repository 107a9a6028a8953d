"""Semantic operators as functions of the domain ``kimigraph``: the body is the operator's reference, translated."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, Node

from kimigraph.adapters.torch_export import FunctionalGraph, export_functional, functionalized_call
from kimigraph.codegen.onnx.experts import gathered_experts
from kimigraph.codegen.onnx.indexing import replaced
from kimigraph.codegen.onnx.recurrence import scanned_prefill
from kimigraph.codegen.onnx.scope import Op, Scope
from kimigraph.codegen.onnx.translation import Handler, Translation, arguments, is_semantic, tensor_of
from kimigraph.ir.errors import CompileError
from kimigraph.ir.onnx_format import DOMAIN
from kimigraph.ir.operators import OPERATORS

REFERENCES: dict[str, Callable[..., Any]] = {"moe_experts": gathered_experts, "kda_prefill": scanned_prefill}
"""References other than the operator's own: that one has shapes that depend on values, or grows with the prompt."""


@dataclass(frozen=True)
class Function:
    """One function: its operator for these shapes and attributes."""

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: dict[str, Any]
    ops: list[Op]
    summary: str


@dataclass(frozen=True)
class Call:
    """A call of a semantic operator: arguments by name, those that it writes, and where these lie."""

    operator: str
    given: dict[str, Any]
    written: dict[str, tuple[Node, tuple[Any, tuple[Any, ...]] | None]]
    bases: tuple[Node, ...]

    @classmethod
    def of(cls, node: Node) -> "Call":
        """The call that ``node`` makes, taken apart where it is functionalized."""
        call = functionalized_call(node)
        if call is None:
            target: Any = node.target
            return cls(target._schema.name.partition("::")[2], arguments(node), {}, ())
        schema = call.operator._schema
        defaults = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
        written = {name: (call.bases[item.base], item.region) for name, item in call.written.items()}
        name = schema.name.partition("::")[2]
        order = {a.name: None for a in schema.arguments}
        return cls(name, {**order, **defaults, **call.plain, **dict.fromkeys(written)}, written, tuple(call.bases))

    @property
    def tensors(self) -> dict[str, Any]:
        """Node or part of a node of each tensor argument by name, items of a list numbered."""
        found: dict[str, Any] = {}
        for name, value in self.given.items():
            if name in self.written:
                found[name] = self.written[name]
            elif isinstance(value, Node):
                found[name] = value
            elif isinstance(value, list | tuple) and any(isinstance(item, Node) for item in value):
                found |= {f"{name}_{place}": item for place, item in enumerate(value)}
        return found

    @property
    def plain(self) -> dict[str, Any]:
        """The arguments that are no tensors and not None."""
        tensors = self.tensors
        return {
            name: value
            for name, value in self.given.items()
            if value is not None and name not in tensors and f"{name}_0" not in tensors
        }


class _Reference(nn.Module):
    """The reference as a module of its tensor arguments."""

    def __init__(self, call: Call) -> None:
        super().__init__()
        self._call = call
        self._names = list(call.tensors)

    def forward(self, *tensors: Tensor) -> Any:
        by_name = dict(zip(self._names, tensors, strict=True))
        given = dict(self._call.given)
        for name, value in given.items():
            if name in by_name:
                given[name] = by_name[name]
            elif f"{name}_0" in by_name:
                given[name] = [by_name[f"{name}_{place}"] for place in range(len(value))]
        reference = REFERENCES.get(self._call.operator, OPERATORS[self._call.operator].reference)
        return reference(**given)


@dataclass
class Semantics:
    """Translates semantic operators: as calls of functions, or with ``flat`` as their bodies in place."""

    table: dict[str, Handler]
    flat: bool = False
    functions: dict[Any, Function] = field(default_factory=lambda: {})
    _bodies: dict[Any, FunctionalGraph] = field(default_factory=lambda: {})

    def body(self, call: Call) -> FunctionalGraph:
        """The functional graph of the reference for the shapes of ``call``."""
        key = _key(call)
        if key not in self._bodies:
            samples = tuple(torch.empty(_shape(value), dtype=_tensor(value).dtype) for value in call.tensors.values())
            self._bodies[key] = export_functional(_Reference(call), samples, {}, strict=False)
        return self._bodies[key]

    def bodies(self, graph: Graph) -> Iterator[tuple[Node, Graph]]:
        """The semantic nodes of a graph, each with the graph of its body."""
        for node in graph.nodes:
            if is_semantic(node):
                yield node, self.body(Call.of(node)).graph

    def __call__(self, t: Translation, node: Node) -> Any:
        call = Call.of(node)
        names = [_part(t, value, node) for value in call.tensors.values()]
        if self.flat:
            results, mutated = self._translated(t.scope, self.body(call), names)
        else:
            function = self._function(call)
            outputs = t.scope.add(function.name, names, len(function.outputs), domain=DOMAIN, **_shown(call.plain))
            count = len(outputs) - len(call.written)
            results, mutated = list(outputs[:count]), list(outputs[count:])
        return _results(t, call, node, results, mutated)

    def _translated(self, scope: Scope, body: FunctionalGraph, names: list[str]) -> tuple[list[str], list[str]]:
        """The body in ``scope``: names of the results, and of the new values of the arguments that it writes."""
        translation = Translation(scope, self.table, self)
        translation.values |= {item.node: name for item, name in zip(_arguments(body), names, strict=True)}
        for item in body.inputs:
            if item.value is not None:
                translation.values[item.node] = scope.constant(item.value, item.value.dtype)
        origin = scope.note, scope.modules
        translation.run(body.graph)
        scope.note, scope.modules = origin
        results = [translation.name(leaf) for leaf in body.results if isinstance(leaf, Node)]
        written = [item for item in _arguments(body) if item.node.name in body.mutations]
        return results, [translation.name(body.mutations[item.node.name]) for item in written]

    def _function(self, call: Call) -> Function:
        key = _key(call)
        if key not in self.functions:
            body, scope = self.body(call), Scope()
            inputs = tuple(scope.unused(name) for name in call.tensors)
            results, mutated = self._translated(scope, body, list(inputs))
            outputs = [scope.unused("out" if place == 0 else f"out_{place}") for place in range(len(results))]
            outputs += [scope.unused(f"{name}_next") for name in call.written]
            for have, want in zip([*results, *mutated], outputs, strict=True):
                scope.add("Identity", (have,), (want,))
            base = "".join(part.capitalize() for part in call.operator.split("_"))
            same = sum(name == call.operator for name, *_ in self.functions)
            name = base if same == 0 else f"{base}_{same + 1}"
            summary = OPERATORS[call.operator].summary
            self.functions[key] = Function(name, inputs, tuple(outputs), _shown(call.plain), scope.ops, summary)
        return self.functions[key]


def _arguments(body: FunctionalGraph) -> list[Any]:
    return [item for item in body.inputs if item.value is None]


def _key(call: Call) -> Any:
    shapes = tuple((name, tuple(_shape(value)), _tensor(value).dtype) for name, value in call.tensors.items())
    return call.operator, shapes, repr(sorted(call.plain.items()))


def _shown(plain: dict[str, Any]) -> dict[str, Any]:
    """Attributes as a viewer shows them; the body has them built in."""
    return {name: int(value) if isinstance(value, bool) else value for name, value in plain.items() if value != ""}


def _tensor(value: Any) -> Tensor:
    return tensor_of(value[0] if isinstance(value, tuple) else value)


def _shape(value: Any) -> list[int]:
    """The shape of an argument; of a written part of a base, that of the part."""
    if isinstance(value, tuple) and value[1] is not None:
        target, args = value[1]
        return list(target(torch.empty(_tensor(value).shape, device="meta"), *args).shape)
    return list(_tensor(value).shape)


def _slice_of(region: tuple[Any, tuple[Any, ...]], node: Node) -> tuple[int, int, int]:
    target, args = region
    if target is not torch.ops.aten.slice.Tensor:
        raise CompileError(
            f"node {node.name} writes a part of a state that is no slice ({target}): ONNX export takes whole states, "
            "or slices of one"
        )
    return args


def _part(t: Translation, value: Any, node: Node) -> str:
    if not isinstance(value, tuple) or value[1] is None:
        return t.name(value[0] if isinstance(value, tuple) else value)
    axis, start, end = _slice_of(value[1], node)
    return t.sliced(t.name(value[0]), axis, start, end)


def _results(t: Translation, call: Call, node: Node, results: list[str], mutated: list[str]) -> Any:
    """What the node became: its results, and for a functionalized call the new value of each base after them."""
    if not call.written:
        return tuple(results) if isinstance(node.meta["val"], tuple | list) else results[0]
    bases = {base: t.name(base) for base in call.bases}
    for (base, region), new in zip(call.written.values(), mutated, strict=True):
        if region is None:
            bases[base] = new
        else:
            axis, start, end = _slice_of(region, node)
            bases[base] = replaced(t, bases[base], tensor_of(base).shape, new, axis, start, end)
    return (*(results or [None]), *(bases[base] for base in call.bases))
