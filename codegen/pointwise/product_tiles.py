"""How a kernel of products of few rows is cut, and in which of three forms it computes them."""

from dataclasses import dataclass
from typing import Any, Literal

import torch

from kimigraph.ir.pointwise import Index, Loops, Value, Variable
from kimigraph.ir.pointwise.index import evaluated
from kimigraph.ir.pointwise.loops import ROW
from kimigraph.ir.pointwise.prepared import LONG, is_streamed, programs_at_most
from kimigraph.ir.pointwise.values import PRODUCT, is_column

Form = Literal["stream", "held", "dot"]
"""``stream``: steps along the depth, every lane sums its own elements. ``held``: whole rows are prepared once and kept.
``dot``: steps along the depth by matrix units, for several rows."""

LINES = 16
"""Rows that matrix units take at least."""

_MANY = 4096
"""With so many columns every multiprocessor has several programs of eight."""

_WHOLE = 4096
"""A row so long is multiplied in one step where columns are few: all of it is on its way at once."""


@dataclass(frozen=True)
class ProductTiles:
    """``rows``: columns of the products in a tile; ``steps`` along each depth; ``turns``: tiles of one program.

    ``ahead``: held rows alone; the weights of a tile are loaded while the one before is worked on.
    """

    form: Form
    rows: int
    steps: tuple[int, ...]
    warps: int
    stages: int
    turns: int = 1
    ahead: bool = False

    def constants(self, loops: Loops) -> dict[str, Any]:
        """The constants of the kernel."""
        steps = {step_name(depth): step for depth, step in zip(loops.depths, self.steps, strict=True)}
        return {"ROWS": self.rows, **steps, "INTERPRET": False}

    def options(self) -> dict[str, Any]:
        """What Triton is told."""
        return {"num_warps": self.warps, "num_stages": self.stages, "enable_fp_fusion": False}

    def programs(self, loops: Loops) -> int:
        """How many programs run."""
        return -(-sum(self.tiles(loops)) // self.turns)

    def tiles(self, loops: Loops) -> list[int]:
        """How many tiles each section has."""
        return [-(-section.row.extent // self.rows) for section in loops.sections]


def step_name(depth: Variable) -> str:
    """The constant that says how many elements of a depth a program takes at a time."""
    return f"{depth.name.upper()}_STEP"


def products_of(loops: Loops) -> list[Value]:
    """The products, in order."""
    return [value for value in loops.values if value.op == PRODUCT]


def weights_of(loops: Loops) -> list[Value]:
    """What the products multiply their rows with, each once."""
    return list({value.args[1].number: value.args[1] for value in products_of(loops)}.values())


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
    """What measured best on an H200: tiles enough to fill it several times over, steps long enough to hide latency."""
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
    tiles = sum(-(-section.row.extent // rows) for section in loops.sections)
    turns = max(-(-tiles // programs_at_most(loops)), 1)
    ahead = turns > 1 and len(loops.sections) == 1 and all(weight.op == "load" for weight in weights_of(loops))
    return ProductTiles("held", rows, steps, 8 if sum(steps) >= LONG else 4, 1, turns, ahead)


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
