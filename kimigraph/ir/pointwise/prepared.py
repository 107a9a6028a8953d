"""What it costs that every program of a kernel of products prepares the products' rows for itself."""

from math import prod

from torch.fx import Node

from kimigraph.ir.cost import VECTOR, Work
from kimigraph.ir.pointwise.loops import MOST_HELD, Loops
from kimigraph.ir.pointwise.values import PRODUCT, Value, is_column
from kimigraph.ir.pointwise.views import shape_of

LONG = 4096
"""Elements of prepared rows, padded to powers of two, from which fewer programs prepare them."""


def prepared_work(loops: Loops) -> Work:
    """Bytes and FLOPs beyond those of one program; nothing where rows are multiplied as they are.

    Bytes count at the rate of memory, though a cache that all programs share answers: an estimate to the safe side.
    """
    if not loops.depths or is_streamed(loops):
        return Work()
    repeats = min(programs_at_most(loops), loops.rows) - 1
    shared = [value for value in loops.values if value.axes and all(map(is_column, value.axes))]
    read = sum(_extent(loops, value) * value.dtype.itemsize for value in shared if value.op == "load")
    computed = sum(_extent(loops, value) for value in shared if value.op not in ("load", "constant", "index"))
    return Work(read * repeats, {VECTOR: computed * repeats})


def programs_at_most(loops: Loops) -> int:
    """How many programs prepare rows for themselves: four for each multiprocessor of an H200, three of long rows."""
    return 396 if has_long_rows(loops) else 528


def has_long_rows(loops: Loops) -> bool:
    """Whether prepared rows are long."""
    return sum(1 << (depth.extent - 1).bit_length() for depth in loops.depths) >= LONG


def weights_multiplied(loops: Loops) -> int:
    """With how many weights prepared rows are multiplied, for each of the rows."""
    return loops.lines * len({value.args[1].number for value in loops.values if value.op == PRODUCT})


def is_streamed(loops: Loops) -> bool:
    """Whether rows and weights are multiplied as they lie in memory."""
    return all(value.op == "load" for value in loops.values if any(map(is_column, value.axes)))


def may_be_held(rows: Node) -> bool:
    """Whether a program has registers enough for all of a tensor's rows."""
    *lead, depth = shape_of(rows)
    return prod(lead) * (1 << (depth - 1).bit_length()) <= MOST_HELD


def _extent(loops: Loops, value: Value) -> int:
    return max(depth.extent for depth in loops.depths if depth.name in value.axes)
