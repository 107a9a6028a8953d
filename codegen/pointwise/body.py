"""The statements of a generated kernel."""

import ast
from collections.abc import Iterable, Sequence

import torch

from kimigraph.codegen.pointwise.expressions import (
    COMPARISONS,
    condition,
    expression,
    index_expression,
    triton_type,
)
from kimigraph.codegen.pointwise.names import Names
from kimigraph.codegen.pointwise.syntax import assignment, binary, call, compare, joined, lines, method, name, number
from kimigraph.codegen.pointwise.tiles import Tiles
from kimigraph.ir.pointwise import Index, Loops, Store, Value
from kimigraph.ir.pointwise.loops import ELEMENT, ROW
from kimigraph.ir.pointwise.values import COLUMN, NARROW, REDUCTIONS, Guard, axes_of
from kimigraph.ir.pointwise.writes import fetched_by_store

INT32 = 2**31


class Body:
    """Writes the statements of one kernel, in order."""

    def __init__(self, loops: Loops, tiles: Tiles, names: Names) -> None:
        self.loops, self.tiles, self.names = loops, tiles, names
        self.text: list[str] = []
        self.indent = "    "
        self.uses: dict[int, int] = {}
        for value in loops.values:
            for argument in value.args:
                self.uses[argument.number] = self.uses.get(argument.number, 0) + 1
        self.levels: dict[int, int] = {}
        for value in loops.values:
            below = max((self.levels[argument.number] for argument in value.args), default=0)
            self.levels[value.number] = below + (value.op in REDUCTIONS)
        self.read = {value.detail.buffer for value in loops.loads}

    def statements(self) -> list[str]:
        """The whole body."""
        if self.tiles.early:
            self._line(call("start_next_launch", name("INTERPRET")))
            self._line(call("await_earlier_launch", name("INTERPRET")))
        if self.loops.columns is None:
            self._place(ELEMENT, "inside", self.loops.rows, "ELEMENTS", self.tiles.rows, "")
            self._all()
            return self.text
        self._place(ROW, "row_inside", self.loops.rows, "ROWS", self.tiles.rows, "[:, None]")
        if self.tiles.held:
            across = self.tiles.across
            self._columns(f"tl.program_id(0) % {across} * COLUMNS + " if across > 1 else "")
            self._all()
        else:
            self._passes()
        return self.text

    def _all(self) -> None:
        """Every value, each new tensor stored as soon as its values are there; what is overwritten comes last."""
        waiting = [store for store in self.loops.stores if store.buffer is None]
        done: set[int] = set()
        for value in self.loops.values:
            self._emit([value])
            done.add(value.number)
            ready = [store for store in waiting if store.value.number in done]
            self._store(ready)
            waiting = [store for store in waiting if store not in ready]
        self._store([store for store in self.loops.stores if store.buffer is not None])

    # Places and masks

    def _place(self, variable: str, mask: str, extent: int, constant: str, block: int, reshape: str) -> None:
        program = call("tl.program_id", number(0))
        if self.tiles.across > 1:
            program = binary(program, "//", number(self.tiles.across))
        if self._wide():
            program = method(program, "to", triton_type(torch.int64))
        span = ast.parse(f"tl.arange(0, {constant}){reshape}", mode="eval").body
        self._line(assignment(variable, binary(binary(program, "*", name(constant)), "+", span)))
        if extent % block:
            self._line(assignment(mask, compare(name(variable), "lt", number(extent))))

    def _columns(self, start: str = "") -> None:
        self._line(ast.parse(f"column = {start}tl.arange(0, COLUMNS)[None, :]").body[0])
        if self._columns_masked():
            assert self.loops.columns is not None
            self._line(assignment("column_inside", compare(name("column"), "lt", number(self.loops.columns))))
            if self._rows_masked():
                self._line(assignment("inside", binary(name("row_inside"), "&", name("column_inside"))))

    def _rows_masked(self) -> bool:
        return self.loops.rows % self.tiles.rows != 0

    def _columns_masked(self) -> bool:
        return self.loops.columns is not None and self.loops.columns % self.tiles.columns != 0

    def _mask(self, axes: Iterable[str]) -> ast.expr | None:
        """Where a tile that varies along ``axes`` lies inside the tensors."""
        if ELEMENT in axes:
            return name("inside") if self._rows_masked() else None
        rows, columns = ROW in axes and self._rows_masked(), COLUMN in axes and self._columns_masked()
        if rows and columns:
            return name("inside")
        return name("row_inside") if rows else name("column_inside") if columns else None

    def _wide(self) -> bool:
        """Whether an index can pass 2^31."""
        addresses = [value.detail.address for value in self.loops.loads]
        addresses += [store.address for store in self.loops.stores]
        extent = self.loops.rows * (self.loops.columns or 1)
        return extent >= INT32 or any(address.most >= INT32 for address in addresses)

    # Values

    def _line(self, statement: ast.stmt | ast.expr) -> None:
        self.text += lines(statement, self.indent)

    def _emit(self, values: Iterable[Value]) -> None:
        for value in values:
            if not self._inline(value):
                self._line(assignment(self.names.value(value), self._computed(value)))

    def _inline(self, value: Value) -> bool:
        """Whether a value stands where it is used: numbers, places, and truth values that are used once."""
        if value.op in ("constant", "index"):
            return True
        return value.op in (*COMPARISONS, "and", "or") and self.uses.get(value.number, 0) == 1

    def _operand(self, value: Value) -> ast.expr:
        if not self._inline(value):
            return name(self.names.value(value))
        return expression(value, self._operand)

    def _fetched(self, value: Value) -> ast.expr:
        tree = self._operand(value)
        return method(tree, "to", triton_type(torch.int64)) if value.dtype is torch.int32 and self._wide() else tree

    def _computed(self, value: Value) -> ast.expr:
        if value.op == "load":
            return self._load(value)
        if value.op in REDUCTIONS:
            return self._reduced(value, self._kept(value))
        return expression(value, self._operand)

    def _load(self, value: Value) -> ast.expr:
        load = value.detail
        place = self._pointer(self.names.buffers[load.buffer], load.address, value.axes)
        mask = self._guarded(value.axes, load.guard)
        options = {} if mask is None else {"mask": mask, "other": number(0.0 if value.dtype.is_floating_point else 0)}
        if self.tiles.early:
            options["cache_modifier"] = ast.Constant(".cg")  # an L1 cache may hold what was there before
        elif self.tiles.across > 1 and COLUMN in value.axes:
            options["eviction_policy"] = ast.Constant("evict_last")  # the neighbour may need the rest of a line
        tree = call("tl.load", place, **options)
        return method(tree, "to", triton_type(torch.float32)) if value.dtype in NARROW else tree

    def _pointer(self, tensor: str, address: Index, axes: Iterable[str]) -> ast.expr:
        """The address of an element, as large a tile as ``axes`` say."""
        place = index_expression(address, self._fetched)
        for axis in sorted(set(axes) - axes_of(address)):
            place = binary(place, "+", binary(number(0), "*", name(axis)))
        if not address.terms and not address.constant and isinstance(place, ast.Constant):
            return name(tensor)
        return binary(name(tensor), "+", place)

    def _guarded(self, axes: Iterable[str], guard: Guard) -> ast.expr | None:
        parts = [self._mask(axes), condition(guard, self._operand)]
        return joined("&", [part for part in parts if part is not None])

    # Reductions

    def _identity(self, value: Value) -> ast.expr:
        if value.op == "sum":
            return number(0.0 if value.dtype.is_floating_point else 0)
        if value.dtype.is_floating_point:
            return number(float("-inf") if value.op == "max" else float("inf"))
        limits = torch.iinfo(value.dtype)
        return number(limits.min if value.op == "max" else limits.max)

    def _kept(self, value: Value) -> ast.expr:
        """The reduced operand, with what lies outside the row replaced by what changes nothing."""
        tree = self._operand(value.args[0])
        if not self._columns_masked():
            return tree
        return call("tl.where", name("column_inside"), tree, self._identity(value))

    def _reduced(self, value: Value, tree: ast.expr) -> ast.expr:
        return call(f"tl.{value.op}", tree, axis=number(1), keep_dims=number(True))

    def _passes(self) -> None:
        """A loop along the row for each level of reductions, and one for what is stored along it."""
        top = max(self.levels.values(), default=0)
        for level in range(top + 1):
            self._emit(value for value in self.loops.values if self._is_row_value(value, level))
            reductions = [v for v in self.loops.values if v.op in REDUCTIONS and self.levels[v.number] == level + 1]
            if reductions:
                self._pass(reductions)
        along = [store for store in self.loops.stores if COLUMN in axes_of(store.address)]
        self._store([store for store in self.loops.stores if store not in along])
        if along:
            self._loop()
            self._emit(self._along([store.value for store in along], along))
            self._store(along)
            self.indent = "    "

    def _is_row_value(self, value: Value, level: int) -> bool:
        return self.levels[value.number] == level and COLUMN not in value.axes and value.op not in REDUCTIONS

    def _loop(self) -> None:
        self.text.append(f"{self.indent}for start in range(0, {self.loops.columns}, COLUMNS):")
        self.indent = "        "
        self._columns("start + ")

    def _pass(self, reductions: list[Value]) -> None:
        totals = {value.number: self.names.local(f"{self.names.value(value)}_so_far") for value in reductions}
        for value in reductions:
            shape = ast.parse("[ROWS, COLUMNS]", mode="eval").body
            full = call("tl.full", shape, self._identity(value), triton_type(value.dtype))
            self._line(assignment(totals[value.number], full))
        self._loop()
        self._emit(self._along([value.args[0] for value in reductions], []))
        for value in reductions:
            total = name(totals[value.number])
            kept = self._kept(value)
            combined = binary(total, "+", kept) if value.op == "sum" else call(f"tl.{value.op}imum", total, kept)
            self._line(assignment(totals[value.number], combined))
        self.indent = "    "
        for value in reductions:
            self._line(assignment(self.names.value(value), self._reduced(value, name(totals[value.number]))))

    def _along(self, wanted: list[Value], stores: list[Store]) -> list[Value]:
        """The values along the row that these need, in order."""
        pending, found = [*wanted], dict[int, Value]()
        for store in stores:
            pending += [v for v in self.loops.values if v.axes & {COLUMN} and _places(store, v)]
        while pending:
            value = pending.pop()
            if value.number not in found and COLUMN in value.axes:
                found[value.number] = value
                pending += value.args
        return [found[key] for key in sorted(found)]

    # Results

    def _store(self, stores: Sequence[Store]) -> None:
        if any(store.buffer in self.read for store in stores):
            self._line(call("tl.debug_barrier"))  # other warps may have to read what is overwritten
        for store in stores:
            tensor = self.names.results[store.node] if store.buffer is None else self.names.buffers[store.buffer]
            axes = self._stored_axes(store)
            mask = self._guarded(axes, store.guard)
            tree = self._operand(store.value)
            if store.value.dtype is not torch.bool and store.value.op != "constant":
                tree = method(tree, "to", name(f"{tensor}.dtype.element_ty"))
            options = {} if mask is None else {"mask": mask}
            self._line(call("tl.store", self._target(tensor, store, axes), tree, **options))

    def _stored_axes(self, store: Store) -> set[str]:
        """The axes of the tile that is stored."""
        return {ELEMENT} if self.loops.columns is None else {ROW, COLUMN} & (axes_of(store.address) | {ROW})

    def _target(self, tensor: str, store: Store, axes: Iterable[str]) -> ast.expr:
        return self._pointer(tensor, store.address, axes)


def _places(store: Store, value: Value) -> bool:
    """Whether the store's place takes the value from a tensor of indices."""
    return value in fetched_by_store(store.address, store.guard)
