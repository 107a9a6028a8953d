"""A group of nodes as loops: over elements, or over rows with a reduction along each row, and what each step stores."""

from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch.fx import Node

from kimigraph.ir.pointwise import elementwise, places, products, reductions, writes
from kimigraph.ir.pointwise.index import ZERO, Index, Remainder, Variable, evaluated, flattened, of, unflattened
from kimigraph.ir.pointwise.reader import Reader
from kimigraph.ir.pointwise.unfusable import Unfusable
from kimigraph.ir.pointwise.values import COLUMN, PRODUCT, REDUCTIONS, Load, Value, axes_of
from kimigraph.ir.pointwise.views import Position, is_index_map, shape_of
from kimigraph.ir.purity import mutated_arguments, storage_root
from kimigraph.ir.schemas import nodes_in

ROW = "row"
ELEMENT = "element"
RULES = {**elementwise.RULES, **places.RULES, **reductions.RULES, **writes.RULES}
SHORTEST_TURN = 16
"""Tensors with shorter sides are not worth a tile that turns them."""

LONGEST_ROW = 65536
"""A longer reduction wants several programs a row, which these loops do not have."""

MOST_HELD = 8192
"""Elements of prepared rows of products, padded to powers of two: a program holds all of them."""

LONG_ROW, FEWEST_LONG_ROWS = 16384, 32
"""So does a long one where there are few rows."""


@dataclass(frozen=True)
class Store:
    """One element written: into a new tensor for ``node``, or into the outside tensor ``buffer`` that it writes."""

    node: Node
    buffer: Node | None
    address: Index
    guard: tuple[Any, ...]
    value: Value


@dataclass(frozen=True)
class Section:
    """Results of products of one width: the variable that counts their columns, and what is stored for each."""

    row: Variable
    stores: tuple[Store, ...]


@dataclass(frozen=True)
class Loops:
    """``rows`` elements, or with ``columns`` that many rows of so many; ``values`` in order, arguments first.

    With products, ``depths`` are the variables that reductions run over, ``columns`` is the extent of the first of
    them, and each row is stored ``lines`` times: a row is one column of the products' results, at all their rows.
    Results of different widths have rows of their own: ``sections``, of which ``rows`` is the sum.
    """

    rows: int
    columns: int | None
    stores: tuple[Store, ...]
    values: tuple[Value, ...]
    depths: tuple[Variable, ...] = ()
    lines: int = 1
    sections: tuple[Section, ...] = ()

    @property
    def reduces(self) -> bool:
        """Whether rows are reduced; without, they are there to turn tensors."""
        return any(value.op in REDUCTIONS for value in self.values)

    @property
    def loads(self) -> list[Value]:
        """The values that are read from outside."""
        return [value for value in self.values if value.op == "load"]

    @property
    def buffers(self) -> list[Node]:
        """The outside tensors that are read or written, in order of first use."""
        read = [value.detail.buffer for value in self.loads]
        return list(dict.fromkeys([*read, *(store.buffer for store in self.stores if store.buffer is not None)]))

    @property
    def results(self) -> list[Node]:
        """The nodes for whose results there are new tensors."""
        return list(dict.fromkeys(store.node for store in self.stores if store.buffer is None))


def is_known(node: Node) -> bool:
    """Whether there is a rule for the operation; a particular call may still be refused."""
    return node.op == "call_function" and (node.target in RULES or is_index_map(node))


def lower(members: Sequence[Node], outputs: Collection[Node]) -> Loops:
    """The loops that compute ``members``, in graph order, of which ``outputs`` are used outside.

    Raises Unfusable with the node at fault where they are no single loop nest.
    """
    inside = frozenset(members)
    written = [node for node in members if mutated_arguments(node)]
    _check_writes(members, written)
    sinks = [node for node in members if node in outputs or node in written]
    if not sinks:
        raise Unfusable("nothing of it is used", members[-1])
    source, dims = _reduction(members)
    if any(map(products.is_product, members)):
        reader = Reader(inside, {**RULES, **products.RULES}, several=True)
        loops = _products(reader, sinks, [node for node in members if products.is_product(node)])
    elif source is None:
        loops = _elements(Reader(inside, RULES), sinks)
        if any(_steps(value, ELEMENT) > 1 for value in loops.loads):
            with suppress(Unfusable):
                loops = _turned(Reader(inside, RULES), sinks, loops)
    else:
        columns = prod(shape_of(source)[dim] for dim in dims)
        if not 0 < columns <= LONGEST_ROW or prod(shape_of(source)) == 0:
            raise Unfusable(f"it reduces over {columns} elements, more than {LONGEST_ROW} or none", source)
        if columns > LONG_ROW and prod(shape_of(source)) < FEWEST_LONG_ROWS * columns:
            raise Unfusable("its rows are too long and too few for one program each", source)
        loops = _rows(Reader(inside, RULES, columns), sinks, shape_of(source), dims)
    _check_addresses(loops)
    return loops


def stands_alone(node: Node) -> bool:
    """Whether the node is a loop nest by itself."""
    try:
        lower([node], [node])
    except Unfusable:
        return False
    return True


def _reduction(members: Sequence[Node]) -> tuple[Node | None, tuple[int, ...]]:
    """The operand of the first reduction, and the dims that it runs over."""
    for node in members:
        dims = reductions.reduced_dims(node)
        if dims is not None:
            return Reader.source(node), dims
    return None, ()


def _elements(reader: Reader, sinks: Sequence[Node]) -> Loops:
    """Elements in the memory order of the first result."""
    shape = writes.shape_of_sink(sinks[0])
    count = prod(shape)
    if count == 0:
        raise Unfusable("it has no elements", sinks[0])
    order = _memory_order(sinks[0], shape)
    along = unflattened(of(Variable(ELEMENT, count)), [shape[dim] for dim in order])
    position = tuple(along[order.index(dim)] for dim in range(len(shape)))
    stores: list[Store] = []
    for sink in sinks:
        own = writes.shape_of_sink(sink)
        if prod(own) != count:
            raise Unfusable("its results differ in size", sink)
        stores.append(_store(reader, sink, position if own == shape else unflattened(flattened(position, shape), own)))
    return Loops(count, None, tuple(stores), _needed(stores))


def _turned(reader: Reader, sinks: Sequence[Node], flat: Loops) -> Loops:
    """The elements as rows along the fastest dim, if a tensor that is read lies the other way; else as they are.

    A tile of both can read one way and write the other, each time what lies side by side.
    """
    shape = writes.shape_of_sink(sinks[0])
    order = _memory_order(sinks[0], shape)
    columns = next(filter(None, (_period(value.detail.address) for value in flat.loads)), 1)
    rows = flat.rows // columns
    if min(rows, columns) < SHORTEST_TURN or flat.rows % columns:
        return flat
    flattened_position = of(Variable(ROW, rows)) * columns + of(Variable(COLUMN, columns))
    along = unflattened(flattened_position, [shape[dim] for dim in order])
    position = tuple(along[order.index(dim)] for dim in range(len(shape)))
    stores = [
        _store(reader, sink, position if own == shape else unflattened(flattened(position, shape), own))
        for sink, own in ((sink, writes.shape_of_sink(sink)) for sink in sinks)
    ]
    loops = Loops(rows, columns, tuple(stores), _needed(stores))
    return loops if any(_steps(value, ROW) == 1 for value in loops.loads) else flat


def _period(address: Index) -> int:
    """After how many elements the fastest dim of a turned tensor begins anew; 0 where none does."""
    element = [(atom, 1) for atom in address.atoms() if isinstance(atom, Variable)][:1]
    for atom, factor in address.terms:
        if isinstance(atom, Remainder) and abs(factor) > 1 and list(atom.of.terms) == element:
            return atom.by
    return 0


def _steps(value: Value, variable: str) -> int:
    """By how many elements a load moves where ``variable`` moves by one; 0 where that depends on fetched elements."""
    load: Load = value.detail
    if value.args:
        return 0
    return abs(evaluated(load.address, {variable: 1}) - evaluated(load.address, {}))


def _memory_order(sink: Node, shape: Sequence[int]) -> list[int]:
    value = sink.meta["val"]
    if not isinstance(value, torch.Tensor) or tuple(value.shape) != tuple(shape):
        return list(range(len(shape)))
    return sorted(range(len(shape)), key=lambda dim: (-value.stride()[dim] if shape[dim] > 1 else 0, dim))


def _rows(reader: Reader, sinks: Sequence[Node], shape: Sequence[int], dims: tuple[int, ...]) -> Loops:
    columns = reader.columns
    assert columns is not None
    kept = [size for dim, size in enumerate(shape) if dim not in dims]
    rows = prod(kept)
    row, column = of(Variable(ROW, rows)), of(Variable(COLUMN, columns))
    outer = iter(unflattened(row, kept))
    inner = iter(unflattened(column, [shape[dim] for dim in dims]))
    position = tuple(next(inner) if dim in dims else next(outer) for dim in range(len(shape)))
    stores = [_placed(reader, sink, position, shape, (row, column), (rows, columns)) for sink in sinks]
    return Loops(rows, columns, tuple(stores), _needed(stores))


def _products(reader: Reader, sinks: Sequence[Node], found: Sequence[Node]) -> Loops:
    """Columns of products: what stands at a column is computed once for each row of the products."""
    lines = products.lines_of(found[0])
    if not 1 <= lines <= products.MOST_LINES:
        raise Unfusable(f"it has {lines} rows, more than {products.MOST_LINES} or none", found[0])
    odd = next((node for node in found if products.lines_of(node) != lines), None)
    if odd is not None:
        raise Unfusable("its products have different numbers of rows", odd)
    groups: dict[int, list[Node]] = {}
    for sink in sinks:
        groups.setdefault(prod(writes.shape_of_sink(sink)), []).append(sink)
    sections: list[Section] = []
    for count, group in groups.items():
        if not count or count % lines:
            raise Unfusable("its results differ in size", group[0])
        row = Variable(f"{ROW}_{len(sections)}" if sections else ROW, count // lines)
        places = [of(row) + line * row.extent for line in range(lines)]
        stores = [
            _store(reader, sink, unflattened(place, writes.shape_of_sink(sink))) for place in places for sink in group
        ]
        sections.append(Section(row, tuple(stores)))
    stores = tuple(store for section in sections for store in section.stores)
    depths = tuple(reader.depths.values())
    if not depths:
        raise Unfusable("nothing of it is used", found[0])
    rows = sum(section.row.extent for section in sections)
    loops = Loops(rows, depths[0].extent, stores, _needed(stores), depths, lines, tuple(sections))
    _check_products(loops, found)
    return loops


def _check_products(loops: Loops, found: Sequence[Node]) -> None:
    """No element is computed twice, a weight is read once for all rows, and rows do not change along the columns."""
    extents = {section.row.name: section.row.extent for section in loops.sections}
    for node in found:
        values = [value for value in loops.values if value.op == PRODUCT and value.node is node]
        weights = {value.args[1].number for value in values}
        if sum(prod(extents[axis] for axis in value.axes) for value in values) > prod(shape_of(node)):
            raise Unfusable("elements of it would be computed more than once", node)
        if len(values) != len(weights) * loops.lines:
            raise Unfusable("its weight would be read once for each row", node)
        if loops.lines > 1 and not products.has_own_rows(node) and any(v.args[0].axes & {*extents} for v in values):
            raise Unfusable("its rows would be read once for each column", node)
    prepared = {v.args[0].number: v.detail.extent for v in loops.values if v.op == PRODUCT and v.args[0].op != "load"}
    if sum(1 << (extent - 1).bit_length() for extent in prepared.values()) > MOST_HELD:
        raise Unfusable("what is done to its rows would not fit into registers", found[0])
    if not prepared and len(loops.sections) > 1:
        raise Unfusable("its results differ in size", loops.sections[1].stores[0].node)


def _placed(
    reader: Reader,
    sink: Node,
    position: Position,
    shape: Sequence[int],
    loops: tuple[Index, Index],
    extents: tuple[int, int],
) -> Store:
    """The store of a result of any shape: the places where rows and columns may lie in it are tried in turn."""
    own = writes.shape_of_sink(sink)
    (row, column), (rows, columns) = loops, extents
    places: list[Position] = []
    if own == tuple(shape):
        places.append(position)
    if prod(own) == rows * columns:
        places.append(unflattened(flattened(position, shape), own))
        places.append(unflattened(row * columns + column, own))
        places += _columns_along(own, row, column, columns)
    if prod(own) == rows:
        places.append(unflattened(row, own))
    refused = Unfusable("its results differ in size", sink)
    for place in dict.fromkeys(places):
        try:
            return _store(reader, sink, place)
        except Unfusable as reason:
            refused = reason
    raise refused


def _columns_along(shape: Sequence[int], row: Index, column: Index, columns: int) -> Iterable[Position]:
    for dim, size in enumerate(shape):
        if size == columns:
            outer = unflattened(row, [*shape[:dim], *shape[dim + 1 :]])
            yield (*outer[:dim], column, *outer[dim:])


def _store(reader: Reader, sink: Node, position: Position) -> Store:
    if mutated_arguments(sink):
        buffer, address, guard, value = writes.written(reader, sink, position)
        store = Store(sink, buffer, address, guard, value)
    else:
        value = reader.value(sink, position)
        address = ZERO
        for index, step in zip(position, sink.meta["val"].stride(), strict=True):
            address = address + index * int(step)
        store = Store(sink, None, address, (), value)
    missing = store.value.axes - axes_of(store.address)
    if missing:
        raise Unfusable("a reduction would be needed at every element of another", sink)
    return store


def _needed(stores: Sequence[Store]) -> tuple[Value, ...]:
    found: dict[int, Value] = {}
    pending = [
        value for store in stores for value in (store.value, *writes.fetched_by_store(store.address, store.guard))
    ]
    while pending:
        value = pending.pop()
        if value.number not in found:
            found[value.number] = value
            pending.extend(value.args)
    return tuple(found[number] for number in sorted(found))


def _check_writes(members: Sequence[Node], written: Sequence[Node]) -> None:
    """Each written storage is written once, and what else reads it does so before, through the same tensor."""
    inside, order = set(members), {node: place for place, node in enumerate(members)}
    roots: set[Node] = set()
    for node in written:
        targets = mutated_arguments(node)
        target = targets[0]
        if len(targets) != 1 or target in inside:
            raise Unfusable("it writes what the region computes", node)
        root = storage_root(target)
        if root in roots:
            raise Unfusable("one tensor is written twice", node)
        roots.add(root)
        for other in members:
            for argument in nodes_in([*other.args, *other.kwargs.values()]):
                if argument in inside or storage_root(argument) is not root or other is node:
                    continue
                if argument is not target or order[other] > order[node]:
                    raise Unfusable("what is written is read in another way", other)


def _check_addresses(loops: Loops) -> None:
    """What is read of a written tensor is what the same step overwrites."""
    places: dict[Node, set[Index]] = {}
    for store in loops.stores:
        if store.buffer is not None:
            places.setdefault(store.buffer, set()).add(store.address)
    for value in loops.loads:
        load: Load = value.detail
        if load.buffer in places and load.address not in places[load.buffer]:
            raise Unfusable("an element is read that another step overwrites", load.buffer)
