"""The statements of a generated kernel of products of few rows, with what is done to their rows and columns."""

import ast
from collections.abc import Callable, Iterable

from kimigraph.codegen.pointwise.body import Body
from kimigraph.codegen.pointwise.names import Names
from kimigraph.codegen.pointwise.product_tiles import (
    LINES,
    ProductTiles,
    lies_along,
    line_step,
    products_of,
    section_weights,
    step_name,
    weights_of,
)
from kimigraph.codegen.pointwise.syntax import assignment, binary, call, compare, joined, method, name, number
from kimigraph.codegen.pointwise.tiles import Tiles
from kimigraph.ir.pointwise import Loops, Store, Value, Variable
from kimigraph.ir.pointwise.loops import Section
from kimigraph.ir.pointwise.values import NARROW, PRODUCT, is_column

LINE_BYTES = 128
"""Bytes that memory is asked for at least."""


class ProductBody(Body):
    """Writes the statements of one kernel; a row of its tiles is a column of the products."""

    def __init__(self, loops: Loops, tiles: ProductTiles, names: Names) -> None:
        super().__init__(loops, Tiles(tiles.rows, 1, tiles.warps), names)
        self.cut = tiles
        self.early: dict[int, str] = {}
        self.weights = {value.number for value in weights_of(loops)}

    def statements(self) -> list[str]:
        """The whole body."""
        if self.cut.form == "held":
            self._whole()
        else:
            self._along_depths()
        return self.text

    # Rows that are prepared once, and kept

    def _whole(self) -> None:
        for depth in self.loops.depths:
            self._depth(depth)
        self._line(assignment("program", self._program()))
        if self.cut.ahead:
            self._for_each_section(self._ask)
        self._emit(value for value in self.loops.values if not self._is_row_wise(value))
        self._for_each_section(self._turns)

    def _for_each_section(self, write: Callable[[Section, str, int], None]) -> None:
        """Branches over the program's number: ``write`` gets a section, the program's number in it, and its turns."""
        outer, begin = self.indent, 0
        turns = self.cut.turns(self.loops)
        dealt = self.cut.dealt or tuple(self.cut.tiles(self.loops))
        for section, programs, most in zip(self.loops.sections, dealt, turns, strict=True):
            if len(turns) > 1:
                last = section is self.loops.sections[-1]
                head = "else:" if last else f"{'elif' if begin else 'if'} program < {begin + programs}:"
                self.text.append(f"{outer}{head}")
                self.indent = outer + "    "
            write(section, f"(program - {begin})" if begin else "program", most)
            begin += programs
        self.indent = outer

    def _turns(self, section: Section, program: str, most: int) -> None:
        """The tiles of one section, in turns."""
        outer = self.indent
        if most > 1:
            self.text.append(f"{outer}for turn in tl.range(0, {most}, num_stages={self.cut.stages}):")
            self.indent += "    "
            program = f"({program} + turn * {self._dealt(section)})"
        self._row(section, program)
        self._emit(value for value in self.loops.values if section.row.name in value.axes)
        self._store(section.stores)
        self.indent = outer

    def _ask(self, section: Section, program: str, most: int) -> None:
        """Ask for the weights of the first tiles, so that they are on their way while rows are prepared."""
        row = section.row.name
        asked, asked_depth = self.names.local("asked"), self.names.local("asked_depth")
        for turn in range(min(self.cut.ahead, most)):
            self._row(section, f"({program} + {turn * self._dealt(section)})" if turn else program, asked)
            inside = call("tl.minimum", name(asked), number(section.row.extent - 1))
            self._line(assignment(asked, inside))
            for value in (value for value in section_weights(self.loops, section) if lies_along(value)):
                depth = next(depth for depth in self.loops.depths if depth.name in value.axes)
                each = LINE_BYTES // value.dtype.itemsize
                lines = 1 << (-(-depth.extent // each) - 1).bit_length()
                span = f"tl.minimum(tl.arange(0, {lines})[None, :] * {each}, {depth.extent - 1})"
                self._line(assignment(asked_depth, ast.parse(span, mode="eval").body))
                place = self._pointer(self.names.buffers[value.detail.buffer], value.detail.address, value.axes)
                place = _Renamed(depth.name, asked_depth).visit(_Renamed(row, asked).visit(place))
                self._line(call("ask_for", place, name("INTERPRET")))

    def _dealt(self, section: Section) -> int:
        return (self.cut.dealt or self.cut.tiles(self.loops))[self.loops.sections.index(section)]

    def _is_row_wise(self, value: Value) -> bool:
        return any(section.row.name in value.axes for section in self.loops.sections)

    def _program(self) -> ast.expr:
        program = call("tl.program_id", number(0))
        return method(program, "to", name("tl.int64")) if self._wide() else program

    def _row(self, section: Section, tile: str, variable: str = "") -> None:
        tree = ast.parse(tile, mode="eval").body
        rows = self.cut.rows_of(self.loops, section)
        size = "ROWS" if rows == self.cut.rows else str(rows)
        span = ast.parse(f"tl.arange(0, {size})[:, None]", mode="eval").body
        masked = not variable and self._row_masked(section)
        variable = variable or section.row.name
        self._line(assignment(variable, binary(binary(tree, "*", ast.parse(size, mode="eval").body), "+", span)))
        if masked:
            self._line(assignment(f"{variable}_inside", compare(name(variable), "lt", number(section.row.extent))))

    def _row_masked(self, section: Section) -> bool:
        place = self.loops.sections.index(section)
        rows = self.cut.rows_of(self.loops, section)
        return self.cut.turns(self.loops)[place] * self._dealt(section) * rows != section.row.extent

    # Steps along the depths

    def _along_depths(self) -> None:
        self._line(assignment("program", self._program()))
        self._row(self.loops.sections[0], "program")
        if self.cut.early:
            self._load_early()
        before = [value for value in self.loops.values if not self._is_deep(value) and not self.levels[value.number]]
        self._emit(before)
        for depth in self.loops.depths:
            found = [product for product in products_of(self.loops) if product.detail == depth]
            if self.cut.form == "dot":
                self._dots(depth, found)
            else:
                self._sums(depth, found)
        self._emit(value for value in self.loops.values if value not in before and not self._is_deep(value))
        self._store(self.loops.stores)

    def _load_early(self) -> None:
        """Load weights, which no launch writes, before the launches ahead have ended."""
        self._line(call("start_next_launch", name("INTERPRET")))
        for depth in self.loops.depths:
            self._depth(depth)
        for weight in weights_of(self.loops):
            early = self.names.local(f"{self.names.value(weight)}_early")
            self._line(assignment(early, self._raw(weight)))
            self.early[weight.number] = early
        self._line(call("await_earlier_launch", name("INTERPRET")))

    def _is_deep(self, value: Value) -> bool:
        return value.op == PRODUCT or any(map(is_column, value.axes))

    def _sums(self, depth: Variable, found: list[Value]) -> None:
        totals = {product.number: self.names.local(f"{self.names.value(product)}_so_far") for product in found}
        for total in totals.values():
            shape = ast.parse(f"[ROWS, {step_name(depth)}]", mode="eval").body
            self._line(assignment(total, call("tl.zeros", shape, name("tl.float32"))))
        self._loop_along(depth)
        operands = [operand for product in found for operand in reversed(product.args)]
        self._emit({value.number: value for operand in operands for value in self._steps_of(operand)}.values())
        for product in found:
            x, w = map(self._operand, product.args)
            self._line(assignment(totals[product.number], call("tl.fma", w, x, name(totals[product.number]))))
        self.indent = "    "
        for product in found:
            self._line(assignment(self.names.value(product), self._reduced(product, name(totals[product.number]))))

    def _steps_of(self, operand: Value) -> list[Value]:
        """What changes along the depth and is needed for an operand, itself included: a gathered one has indices."""
        wanted: set[int] = set()
        waiting = [operand]
        while waiting:
            value = waiting.pop()
            if value.number not in wanted and any(map(is_column, value.axes)):
                wanted.add(value.number)
                waiting.extend(value.args)
        return [value for value in self.loops.values if value.number in wanted]

    def _dots(self, depth: Variable, found: list[Value]) -> None:
        groups = [[p for p in found if p.args[1] is w] for w in {p.args[1].number: p.args[1] for p in found}.values()]
        if depth is self.loops.depths[0]:
            self._line(ast.parse(f"line = tl.arange(0, {LINES})[None, :]").body[0])
        totals = [self.names.local(f"{self.names.value(group[0])}_so_far") for group in groups]
        for total in totals:
            self._line(assignment(total, ast.parse(f"tl.zeros([ROWS, {LINES}], tl.float32)", mode="eval").body))
        self._loop_along(depth)
        step = step_name(depth)
        self._line(ast.parse(f"depth = start + tl.arange(0, {step})[:, None]").body[0])
        rows: dict[int, str] = {}
        for group, total in zip(groups, totals, strict=True):
            x, w = group[0].args
            if x.number not in rows:
                rows[x.number] = self.names.value(x)
                self._line(assignment(rows[x.number], self._lines(x, depth, line_step(group) or 0)))
            self._line(assignment(self.names.value(w), self._raw(w)))
            operands = [self.names.value(w), rows[x.number], total, "INTERPRET"]
            self._line(assignment(total, call("plus_product", *map(name, operands))))
        self.indent = "    "
        for group, total in zip(groups, totals, strict=True):
            for line, product in enumerate(group):
                one = ast.parse(f"tl.where(line == {line}, {total}, 0.0)", mode="eval").body
                self._line(assignment(self.names.value(product), self._reduced(product, one)))

    def _loop_along(self, depth: Variable) -> None:
        step = step_name(depth)
        self.text.append(f"{self.indent}for start in range(0, {depth.extent}, {step}):")
        self.indent = "        "
        self._depth(depth, "start + ")

    def _depth(self, depth: Variable, start: str = "") -> None:
        self._line(ast.parse(f"{depth.name} = {start}tl.arange(0, {step_name(depth)})[None, :]").body[0])
        if self._masked(depth):
            inside = compare(name(depth.name), "lt", number(depth.extent))
            self._line(assignment(f"{depth.name}_inside", inside))

    def _masked(self, depth: Variable) -> bool:
        return depth.extent % self.cut.steps[self.loops.depths.index(depth)] != 0

    # Values and results

    def _stored_axes(self, store: Store) -> set[str]:
        return {section.row.name for section in self.loops.sections if store in section.stores}

    def _mask(self, axes: Iterable[str]) -> ast.expr | None:
        parts = [
            name(f"{section.row.name}_inside")
            for section in self.loops.sections
            if section.row.name in axes and self._row_masked(section)
        ]
        for depth in self.loops.depths:
            if depth.name in axes and self._masked(depth):
                parts.append(name(f"{depth.name}_inside"))
        return joined("&", parts)

    def _load(self, value: Value) -> ast.expr:
        return self._held(self._raw(value), value)

    def _held(self, tree: ast.expr, value: Value) -> ast.expr:
        return method(tree, "to", name("tl.float32")) if value.dtype in NARROW else tree

    def _raw(self, value: Value) -> ast.expr:
        """The elements as they lie in memory; what is read once makes place for what is read again."""
        if value.number in self.early:
            return name(self.early[value.number])
        load = value.detail
        place = self._pointer(self.names.buffers[load.buffer], load.address, value.axes)
        mask = self._guarded(value.axes, load.guard)
        options = {} if mask is None else {"mask": mask, "other": number(0.0 if value.dtype.is_floating_point else 0)}
        if value.number in self.weights:
            options["eviction_policy"] = ast.Constant("evict_first")
        elif self.cut.early:
            options["cache_modifier"] = ast.Constant(".cg")
        return call("tl.load", place, **options)

    def _lines(self, value: Value, depth: Variable, step: int) -> ast.expr:
        """All rows of the left operand, side by side."""
        load = value.detail
        place = self._pointer(self.names.buffers[load.buffer], load.address, {depth.name})
        place = binary(_Renamed(depth.name, "depth").visit(place), "+", binary(name("line"), "*", number(step)))
        mask = compare(name("line"), "lt", number(self.loops.lines))
        if self._masked(depth):
            mask = binary(compare(name("depth"), "lt", number(depth.extent)), "&", mask)
        return call("tl.load", place, mask=mask, other=number(0.0))

    def _computed(self, value: Value) -> ast.expr:
        if value.op == PRODUCT:
            x, w = value.args
            return self._reduced(value, binary(self._operand(w), "*", self._kept_row(x)))
        return super()._computed(value)

    def _reduced(self, value: Value, tree: ast.expr) -> ast.expr:
        kind = "sum" if value.op == PRODUCT else value.op
        return call(f"tl.{kind}", tree, axis=number(1), keep_dims=number(True))

    def _kept(self, value: Value) -> ast.expr:
        tree = self._operand(value.args[0])
        if not self._masked(value.detail):
            return tree
        return call("tl.where", name(f"{value.detail.name}_inside"), tree, self._identity(value))

    def _kept_row(self, value: Value) -> ast.expr:
        """A prepared row, zero outside: the weight is zero there, but zero times infinity is not."""
        tree = self._operand(value)
        depth = next(depth for depth in self.loops.depths if depth.name in value.axes)
        if value.op == "load" or not self._masked(depth):
            return tree
        return call("tl.where", name(f"{depth.name}_inside"), tree, number(0.0))


class _Renamed(ast.NodeTransformer):
    """Puts one variable in the place of another."""

    def __init__(self, old: str, new: str) -> None:
        self.old, self.new = old, new

    def visit_Name(self, node: ast.Name) -> ast.Name:
        if node.id == self.old:
            node.id = self.new
        return node
