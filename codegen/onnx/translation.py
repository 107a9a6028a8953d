"""Walks a functional ATen graph and asks a table of translations for each operator."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from operator import add, floordiv, getitem, mul
from typing import Any

import torch
from torch import SymBool, SymInt, Tensor
from torch.fx import Graph, Node

from kimigraph.adapters.torch_export import functionalized_call
from kimigraph.codegen.onnx.scope import Scope
from kimigraph.ir.open_sizes import OpenSize, SizeExpressions, sized

Value = Any
"""What a node became: a name, a tuple of names, or None where it returns nothing."""
SILENT = ("_assert_tensor_metadata", "_assert_scalar", "sym_constrain_range_for_size", "_assert_async")


@dataclass
class Translation:
    """One graph on its way into ``scope``. ``table`` has translations by the bare name of the operator."""

    scope: Scope
    table: Mapping[str, "Handler"]
    semantic: Callable[["Translation", Node], Value]
    """Translates calls of ``kimigraph::`` operators, functionalized ones included."""
    values: dict[Node, Value] = field(default_factory=lambda: {})
    _sizes: SizeExpressions[str] = field(init=False)

    def __post_init__(self) -> None:
        self._sizes = SizeExpressions(self._measured, self._computed)

    def run(self, graph: Graph) -> None:
        """Translate every node but the output and placeholders, whose names are in ``values``."""
        for node in graph.nodes:
            if node.op not in ("placeholder", "output"):
                self.scope.note, self.scope.modules = _note(node), _modules(node)
                self.values[node] = self._translated(node)
                if isinstance(node.meta.get("val"), Tensor):
                    self._sizes.note(self.values[node], node.meta["val"])

    def _translated(self, node: Node) -> Value:
        if node.target is getitem:
            whole, place = node.args
            assert isinstance(whole, Node) and isinstance(place, int)
            return self.values[whole][place]
        if is_size(node):
            return None  # computed where it is needed
        if is_semantic(node):
            return self.semantic(self, node)
        name = operator_name(node)
        return None if name in SILENT else self.table[name](self, node)

    def name(self, value: Any, dtype: torch.dtype | None = None) -> str:
        """The name of an argument: a node's, cast to ``dtype`` where that differs; a number becomes a constant."""
        if isinstance(value, Node):
            return self.cast(self.values[value], tensor_of(value).dtype, dtype)
        assert dtype is not None, value
        return self.scope.constant(value, dtype)

    def cast(self, name: str, have: torch.dtype, want: torch.dtype | None) -> str:
        """``name`` as ``want``."""
        return name if want is None or have == want else self.scope.op("Cast", name, to=want)

    def integers(self, sizes: Iterable[Any]) -> str:
        """A list of int64, as shapes and axes are given: a constant, but for sizes that the run alone knows."""
        numbers = [sized(size.meta["val"] if isinstance(size, Node) else size) for size in sizes]
        if all(isinstance(number, int) for number in numbers):
            return self.scope.integers(numbers)
        return self.scope.op("Concat", *map(self._size, numbers), axis=0)

    def _size(self, size: Any) -> str:
        return self._sizes.of(size) if isinstance(size, OpenSize) else self.scope.integers([size])

    def _measured(self, name: str, axis: int) -> str:
        return self.scope.op("Shape", name, start=axis, end=axis + 1)

    def _computed(self, target: Callable[..., Any], a: str | int, b: str | int) -> str:
        kinds = {add: "Add", mul: "Mul", floordiv: "Div", torch.sym_min: "Min", torch.sym_max: "Max"}
        operands = (self.scope.integers([part]) if isinstance(part, int) else part for part in (a, b))
        return self.scope.op(kinds[target], *operands)

    def reshaped(self, name: str, shape: Iterable[Any]) -> str:
        """``name`` in another shape of as many elements."""
        sizes = list(shape)
        allow = 1 if any(not isinstance(size, int) or size == 0 for size in sizes) else None
        return self.scope.op("Reshape", name, self.integers(sizes), allowzero=allow)

    def expanded(self, name: str, shape: Iterable[Any]) -> str:
        """``name`` broadcast to ``shape``."""
        return self.scope.op("Expand", name, self.integers(shape))

    def permuted(self, name: str, order: list[int]) -> str:
        """``name`` with its axes in ``order``."""
        return name if order == sorted(order) else self.scope.op("Transpose", name, perm=order)

    def sliced(self, name: str, axis: int, start: int, end: int, step: int = 1) -> str:
        """The places ``start`` to ``end`` of an axis."""
        s = self.scope
        return s.op("Slice", name, s.integers([start]), s.integers([end]), s.integers([axis]), s.integers([step]))


Handler = Callable[[Translation, Node], Value]


def tensor_of(node: Any) -> Tensor:
    """The fake tensor of a node."""
    value = node.meta["val"]
    assert isinstance(value, Tensor), f"{node} has no single tensor value"
    return value


def operator_name(node: Node) -> str:
    """The bare name of an ATen operator: ``add`` for ``aten::add.Tensor``."""
    schema = getattr(node.target, "_schema", None)
    return schema.name.partition("::")[2] if schema is not None else str(node.target)


def is_size(node: Node) -> bool:
    """Whether the node is a size that the run alone knows, or a truth about one."""
    return isinstance(node.meta.get("val"), SymInt | SymBool)


def is_semantic(node: Node) -> bool:
    """Whether the node calls a ``kimigraph::`` operator, as it is or functionalized."""
    call = functionalized_call(node)
    target: Any = node.target if call is None else call.operator
    return getattr(target, "namespace", "") == "kimigraph"


def arguments(node: Node) -> dict[str, Any]:
    """The arguments of a call by the names of the operator's schema, defaults filled in."""
    given = dict(node.kwargs)
    target: Any = node.target
    for place, argument in enumerate(target._schema.arguments):
        if place < len(node.args):
            given[argument.name] = node.args[place]
        elif argument.name not in given:
            given[argument.name] = argument.default_value
    return given


def unsupported(graph: Graph, table: Mapping[str, Handler]) -> list[tuple[str, str]]:
    """(operator, node) of everything in the graph that the table lacks."""
    found: list[tuple[str, str]] = []
    for node in graph.nodes:
        if node.op == "call_function" and node.target is not getitem and not is_size(node) and not is_semantic(node):
            name = operator_name(node)
            known = name in table or name in SILENT
            if not known or getattr(node.target, "namespace", "") not in ("aten", "kimigraph_onnx"):
                found.append((str(node.target), node.name))
            elif name == "repeat_interleave" and not isinstance(arguments(node).get("repeats"), int):
                found.append((f"{node.target} by a tensor", node.name))
            elif name in ("index", "index_put") and (masks := masks_of(node)):
                if name == "index_put" or masks != [1] or len(masks) != len(_indices(node)):
                    found.append((f"{node.target} with a mask", node.name))
        elif node.op in ("get_attr", "call_module", "call_method"):
            found.append((f"{node.op} {node.target}", node.name))
    return found


def _indices(node: Node) -> list[Node]:
    indices: Any = arguments(node)["indices"]
    return [index for index in indices if isinstance(index, Node)]


def masks_of(node: Node) -> list[int]:
    """The numbers of axes of the masks by which a node picks."""
    forms = [tensor_of(index) for index in _indices(node)]
    return [form.dim() for form in forms if form.dtype in (torch.bool, torch.uint8)]


def _modules(node: Node) -> tuple[str, ...]:
    stack: dict[Any, Any] = node.meta.get("nn_module_stack") or {}
    return tuple(str(entry[0] if isinstance(entry, tuple) else entry) for entry in stack.values())


def _note(node: Node) -> str:
    stack = str(node.meta.get("stack_trace") or "").strip().splitlines()
    frame = next((line.strip() for line in reversed(stack) if line.strip().startswith("File ")), "")
    return f"{node.name}: {frame}" if frame else node.name
