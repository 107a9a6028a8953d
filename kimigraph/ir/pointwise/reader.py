"""The value of a node at an index: views become arithmetic on the index, what is outside becomes a load."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch.fx import Node

from kimigraph.ir.pointwise.arithmetic import Arithmetic, held
from kimigraph.ir.pointwise.index import ZERO, Fetched, Index, Variable, expanded, of, unflattened
from kimigraph.ir.pointwise.unfusable import Unfusable
from kimigraph.ir.pointwise.values import (
    COLUMN,
    Condition,
    Guard,
    Load,
    Value,
    Values,
    axes_of,
    fetched_by,
    is_column,
    simple_guard,
)
from kimigraph.ir.pointwise.views import Position, is_index_map, shape_of, through_view, view_source

TYPES = frozenset(
    (
        *(torch.bfloat16, torch.float16, torch.float32, torch.bool),
        *(torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8),
    )
)
"""The element types that a region may hold."""

LARGEST = 512
"""More values than this make no readable kernel, and registers run out long before."""

Rule = Callable[["Reader", Node, Position, Guard], Value]


@dataclass
class Reader:
    """Reads the values of ``members``; whatever else they use is loaded.

    ``columns`` is the extent of the reduction that all reductions of the region share, None without one. With
    ``several`` reductions may run over different extents, each along a variable of its own.
    """

    members: Collection[Node]
    rules: dict[Any, Rule]
    columns: int | None = None
    several: bool = False
    depths: dict[int, Variable] = field(default_factory=lambda: {})
    values: Values = field(default_factory=Values)
    _known: dict[tuple[Node, Position, Guard], Value] = field(default_factory=lambda: {})

    @property
    def arithmetic(self) -> Arithmetic:
        """Operations on values."""
        return Arithmetic(self.values)

    def value(self, node: Node, position: Position, guard: Guard = ()) -> Value:
        """The element of ``node`` at ``position``, where ``guard`` holds."""
        key = (node, position, guard)
        if key not in self._known:
            if len(self.values.all) > LARGEST:
                raise Unfusable("it takes too many values for one kernel", node)
            self._known[key] = self._read(node, position, guard)
            if self._known[key].node is None:
                self._known[key].node = node
        return self._known[key]

    def _read(self, node: Node, position: Position, guard: Guard) -> Value:
        if node not in self.members:
            return self.load(node, position, guard)
        if is_index_map(node):
            return self.value(view_source(node), through_view(node, position), guard)
        rule = self.rules.get(node.target)
        if rule is None:
            raise Unfusable("no kernel can be generated for this operation", node)
        return rule(self, node, position, guard)

    def load(self, node: Node, position: Position, guard: Guard) -> Value:
        """An element of a tensor from outside; zero where the guard cannot hold."""
        tensor = node.meta.get("val")
        if not isinstance(tensor, torch.Tensor) or tensor.dtype not in TYPES:
            raise Unfusable("its element type has no kernel", node)
        if len(position) != tensor.dim():
            raise Unfusable("it has no static shape", node)
        kept = simple_guard(guard)
        if kept is None:
            return self.values.constant(0, tensor.dtype)
        address = ZERO
        for index, step in zip(position, tensor.stride(), strict=True):
            address = address + index * int(step)
        address = expanded(address)
        fetched = [*fetched_by(address), *(value for index, _, _ in kept for value in fetched_by(index))]
        return self.values.make("load", fetched, tensor.dtype, Load(node, address, kept), node)

    @staticmethod
    def axes(index: Index) -> frozenset[str]:
        """The variables on which an index depends."""
        return axes_of(index)

    def column(self, node: Node, extent: int) -> Variable:
        """The variable of a reduction over so many elements; Unfusable where the region's are over another number."""
        if self.several:
            name = f"{COLUMN}_{len(self.depths)}" if self.depths else COLUMN
            return self.depths.setdefault(extent, Variable(name, extent))
        if extent != self.columns:
            raise Unfusable("its reduction is not over as many elements as the others", node)
        return Variable(COLUMN, extent)

    def position(self, index: Index, dtype: torch.dtype = torch.int64) -> Value:
        """An index as a value."""
        index = expanded(index)
        if not index.terms:
            return self.values.constant(index.constant, dtype)
        return self.values.make("index", fetched_by(index), dtype, index)

    def operand(self, given: Any, node: Node, position: Position, guard: Guard) -> Value:
        """The element of an operand that is broadcast to ``node``; of its own type."""
        if not isinstance(given, Node):
            raise Unfusable("an operand is no tensor", node)
        inner = shape_of(given)
        kept = position[len(position) - len(inner) :]
        return self.value(given, tuple(ZERO if size == 1 else at for at, size in zip(kept, inner, strict=True)), guard)

    def fetched(self, given: Any, position: Position, guard: Guard, extent: int, wraps: bool) -> tuple[Index, Guard]:
        """The index that a tensor of indices gives for a dim of that extent, and the condition that it lies inside.

        ``wraps``: negative indices count from the end. Outside, nothing is read and the element is zero.
        """
        if not isinstance(given, Node) or not isinstance(given.meta.get("val"), torch.Tensor):
            raise Unfusable("an index is no tensor", given)
        if given.meta["val"].dtype not in (torch.int32, torch.int64):
            raise Unfusable("only int32 and int64 tensors can be indices here", given)
        value = self.value(given, position, guard)
        if wraps and not _known_natural(value):
            found = self.arithmetic
            value = found.where(found.lt(value, 0), found.add(value, extent), value)
        if value.op == "index" and 0 <= value.detail.least and value.detail.most < extent:
            return value.detail, ()
        inside: Condition = (of(Fetched(value, 2**62)), 0, extent)
        return of(Fetched(value, extent)), (inside,)

    def reduced(
        self,
        node: Node,
        kind: str,
        dims: Sequence[int],
        position: Position,
        guard: Guard,
        body: Callable[[Position], Value],
    ) -> Value:
        """``body`` reduced (``sum``, ``max``, ``min``) over ``dims`` of positions of the operand's rank."""
        sizes = [shape_of(self.source(node))[dim] for dim in dims]
        variable = self.column(node, prod(sizes))
        fixed = [index for dim, index in enumerate(position) if dim not in dims]
        fixed += [index for index, _, _ in guard]
        if any(is_column(axis) for index in fixed for axis in axes_of(index)):
            raise Unfusable("a reduction would be needed at every element of another", node)
        along = iter(unflattened(of(variable), sizes))
        value = body(tuple(next(along) if dim in dims else index for dim, index in enumerate(position)))
        if variable.name in value.axes:
            return self.values.make(kind, (value,), held(value.dtype), variable)
        return self.arithmetic.mul(value, variable.extent) if kind == "sum" else value

    @staticmethod
    def source(node: Node) -> Node:
        """The first operand."""
        source = node.args[0]
        if not isinstance(source, Node):
            raise Unfusable("an operand is no tensor", node)
        return source


def _known_natural(value: Value) -> bool:
    return value.op == "index" and value.detail.least >= 0
