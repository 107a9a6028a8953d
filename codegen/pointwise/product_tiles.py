"""How a kernel of products of few rows is cut, and in which of three forms it computes them."""

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from kimigraph.ir.pointwise import Index, Loops, Value, Variable
from kimigraph.ir.pointwise.index import evaluated
from kimigraph.ir.pointwise.loops import ROW, Section
from kimigraph.ir.pointwise.prepared import is_streamed, programs_at_most
from kimigraph.ir.pointwise.values import PRODUCT, is_column

Form = Literal["stream", "held", "dot"]
"""``stream``: steps along the depth, every lane sums its own elements. ``held``: whole rows are prepared once and kept.
``dot``: steps along the depth by matrix units, for several rows."""

LINES = 16
"""Rows that matrix units take at least."""

_ROWS_STORED = 512

_MANY = 4096
"""With so many columns every multiprocessor has several programs of eight."""

_WHOLE = 4096
"""A row so long is multiplied in one step where columns are few: all of it is on its way at once."""


@dataclass(frozen=True)
class ProductTiles:
    """``rows``: columns of the products in a tile; ``steps`` along each depth.

    A launch that is ``early`` begins while the one before still runs, and loads its weights before it waits for that:
    those of its only step along the depths. Of held rows alone: ``dealt`` is how many programs each section has, which
    go through its tiles in turns, the weights of the next ``stages`` on their way; those of the first ``ahead`` tiles
    are asked for before rows are prepared.
    """

    form: Form
    rows: int
    steps: tuple[int, ...]
    warps: int
    stages: int
    dealt: tuple[int, ...] = ()
    ahead: int = 0
    early: bool = False

    def constants(self, loops: Loops) -> dict[str, Any]:
        """The constants of the kernel."""
        steps = {step_name(depth): step for depth, step in zip(loops.depths, self.steps, strict=True)}
        return {"ROWS": self.rows, **steps, "INTERPRET": False}

    def options(self) -> dict[str, Any]:
        """What Triton is told."""
        early = {"launch_pdl": True} if self.early else {}
        return {"num_warps": self.warps, "num_stages": self.stages, "enable_fp_fusion": False, **early}

    def programs(self, loops: Loops) -> int:
        """How many programs run."""
        return sum(self.dealt or self.tiles(loops))

    def turns(self, loops: Loops) -> list[int]:
        """How many tiles a program of each section goes through, at most."""
        tiles = self.tiles(loops)
        return [-(-count // programs) for count, programs in zip(tiles, self.dealt or tiles, strict=True)]

    def tiles(self, loops: Loops) -> list[int]:
        """How many tiles each section has."""
        return [-(-section.row.extent // self.rows_of(loops, section)) for section in loops.sections]

    def has_one_step(self, loops: Loops) -> bool:
        """Whether a program multiplies whole rows of its weights at once, and only once."""
        return self.form == "stream" and all(
            step >= depth.extent for step, depth in zip(self.steps, loops.depths, strict=True)
        )

    def rows_of(self, loops: Loops, section: Section) -> int:
        """Columns of a tile of that section; many where it stores what was prepared, and multiplies nothing."""
        if self.form != "held" or section_weights(loops, section):
            return self.rows
        return min(_ROWS_STORED, _padded(section.row.extent))


def step_name(depth: Variable) -> str:
    """The constant that says how many elements of a depth a program takes at a time."""
    return f"{depth.name.upper()}_STEP"


def products_of(loops: Loops) -> list[Value]:
    """The products, in order."""
    return [value for value in loops.values if value.op == PRODUCT]


def weights_of(loops: Loops) -> list[Value]:
    """What the products multiply their rows with, each once."""
    return list({value.args[1].number: value.args[1] for value in products_of(loops)}.values())


def section_weights(loops: Loops, section: Section) -> list[Value]:
    """Those of the weights whose rows the section counts."""
    return [value for value in weights_of(loops) if section.row.name in value.axes]


def lies_along(weight: Value) -> bool:
    """Whether the elements of a weight's rows lie side by side."""
    return _step(weight) == 1


def line_step(products: list[Value]) -> int | None:
    """How far apart the rows lie that the products take with one weight, in elements; None where unevenly."""
    loads = [value.args[0].detail for value in products]
    first = loads[0]
    apart = [_difference(load.address, first.address) for load in loads]
    if any(load.buffer is not first.buffer or load.guard for load in loads) or None in apart:
        return None
    step = (apart[1] or 0) if len(apart) > 1 else 0
    return step if apart == [step * line for line in range(len(apart))] and step else None


def product_tiles_for(loops: Loops) -> ProductTiles:
    """What measured best on an H200: tiles enough to fill it several times over, steps long enough to hide latency.

    A launch is early where no launch writes the weights: what one wrote in place may stand in an L1 cache as it was.
    """
    chosen = _cut(loops)
    return replace(chosen, early=chosen.has_one_step(loops) and all(map(_is_constant, weights_of(loops))))


def _is_constant(weight: Value) -> bool:
    """Whether the weight is one that no launch writes, read at places that need no other value."""
    return weight.op == "load" and not weight.args and bool(weight.detail.buffer.meta.get("constant"))


def _cut(loops: Loops) -> ProductTiles:
    if not is_streamed(loops):
        return _held(loops)
    if loops.lines > 1 and _suits_matrix_units(loops):
        wide = loops.rows * len(weights_of(loops)) >= 2 * _MANY
        steps = tuple(max(min(128, _padded(depth.extent)), 16) for depth in loops.depths)
        return ProductTiles("dot", 64 if wide else 32, steps, 4, 3 if wide else 5)
    return _streamed(loops)


def _held(loops: Loops) -> ProductTiles:
    """Few programs, so that few prepare the rows; each loads a tile of weights while it works on the one before."""
    steps = tuple(_padded(depth.extent) for depth in loops.depths)
    at_once = max(len(weights_of(loops)) // (len(loops.depths) * len(loops.sections)), 1) * loops.lines
    rows = min(max(_floor(8192 // (sum(steps) * at_once)), 1), 16)
    return held_tiles(loops, rows, 4, programs_at_most(loops), 4, 2)


def held_tiles(loops: Loops, rows: int, warps: int, programs: int, stages: int, ahead: int) -> ProductTiles:
    """Held rows by ``programs``, of which each section has its share by the bytes of its weights."""
    steps = tuple(_padded(depth.extent) for depth in loops.depths)
    tiles = ProductTiles("held", rows, steps, warps, stages).tiles(loops)
    nbytes = [
        section.row.extent * sum(weight.dtype.itemsize for weight in section_weights(loops, section))
        for section in loops.sections
    ]
    shares = [max(programs * own // max(sum(nbytes), 1), 1) if own else programs for own in nbytes]
    dealt = tuple(min(count, share) for count, share in zip(tiles, shares, strict=True))
    return ProductTiles("held", rows, steps, warps, stages, dealt, ahead)


def _streamed(loops: Loops) -> ProductTiles:
    weights, longest = weights_of(loops), max(depth.extent for depth in loops.depths)
    if all(_step(weight, ROW) == 1 and _step(weight) != 1 for weight in weights):
        return ProductTiles("stream", 64, _steps(loops, 32), 4, 3)
    if loops.lines > 1:
        return ProductTiles("stream", 2 if len(weights) == 1 else 1, _steps(loops, 512), 4, 3)
    if loops.rows * len(weights) >= _MANY:
        rows, warps = (4, 4) if longest > 1024 else (8, 8)
        return ProductTiles("stream", rows, _steps(loops, 256), warps, 3)
    if longest > _WHOLE:
        return ProductTiles("stream", 2, _steps(loops, 1024), 4, 3)
    steps = _steps(loops, _WHOLE)
    rows = min(max(_floor(_WHOLE // (max(steps) * len(weights))), 1), 16)
    return ProductTiles("stream", rows, steps, 4, 1)


def _steps(loops: Loops, most: int) -> tuple[int, ...]:
    return tuple(min(most, _padded(depth.extent)) for depth in loops.depths)


def _suits_matrix_units(loops: Loops) -> bool:
    groups = [[p for p in products_of(loops) if p.args[1] is weight] for weight in weights_of(loops)]
    for group in groups:
        types = {value.dtype for product in group for value in product.args}
        if len(types) != 1 or not types <= {torch.bfloat16, torch.float16} or line_step(group) is None:
            return False
        if any(ROW in product.args[0].axes for product in group):
            return False
        if any(operand.args for product in group for operand in product.args):  # gathered ones have indices to load
            return False
    return True


def _step(weight: Value, variable: str | None = None) -> int:
    """By how many elements a weight moves along a variable, its depth if none is named."""
    if weight.op != "load" or weight.args:
        return 0
    name = variable or next(filter(is_column, weight.axes))
    address = weight.detail.address
    return abs(evaluated(address, {name: 1}) - evaluated(address, {}))


def _difference(a: Index, b: Index) -> int | None:
    """``a - b`` where that is a number."""
    apart = a + b * -1
    return None if apart.terms else apart.constant


def _floor(size: int) -> int:
    """The largest power of two that is no larger; 0 for 0."""
    return 1 << (size.bit_length() - 1) if size else 0


def _padded(size: int) -> int:
    return 1 << max(size - 1, 0).bit_length()
