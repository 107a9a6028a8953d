"""How much of a region one program computes, and by how many warps."""

from dataclasses import dataclass, replace
from typing import Any

from kimigraph.ir.pointwise import Loops

LONGEST_HELD = 16384
"""The longest row that is held in registers; a longer one is read once for each reduction, and once more."""

_STEP = 4096
"""Columns of a step along such a row."""

_TURN = (64, 32)
"""Rows and columns of a tile that turns tensors: of two bytes each, a line of the cache and half of one."""

_UNITS = 132
"""Multiprocessors to fill before programs grow."""

_EARLY = 4 * _UNITS
"""Programs of a launch that starts early, at most: with more of them the wait is no longer what takes the time."""

_WIDE = 8192
"""So long are rows of which few are read by more warps."""


@dataclass(frozen=True)
class Tiles:
    """``rows`` (elements in a region without reduction) and ``columns`` of a program; ``held``: whole rows at once.

    ``across`` programs side by side share the columns; then a line of the cache can be that of two programs. A launch
    that is ``early`` is set up while the one before still runs, and waits for its end before it reads.
    """

    rows: int
    columns: int
    warps: int
    held: bool = True
    across: int = 1
    early: bool = False

    def constants(self, loops: Loops) -> dict[str, Any]:
        """The constants of the kernel."""
        sizes = {"ELEMENTS": self.rows} if loops.columns is None else {"ROWS": self.rows, "COLUMNS": self.columns}
        return {**sizes, "INTERPRET": False}

    def options(self) -> dict[str, Any]:
        """What Triton is told."""
        # Eager rounds a product before it is added to; contracting them would round once.
        early = {"launch_pdl": True} if self.early else {}
        return {"num_warps": self.warps, "num_stages": 1, "enable_fp_fusion": False, **early}

    def programs(self, loops: Loops) -> int:
        """How many programs run."""
        return -(-loops.rows // self.rows) * self.across


def tiles_for(loops: Loops) -> Tiles:
    """Few enough programs that each has work, enough that the device has some everywhere; measured on an H200."""
    chosen = _cut(loops)
    return replace(chosen, early=chosen.held and chosen.programs(loops) <= _EARLY)


def _cut(loops: Loops) -> Tiles:
    if loops.columns is None:
        return _flat(loops.rows)
    width = _padded(loops.columns)
    if not loops.reduces:
        return _turning(loops.rows, loops.columns)
    if width > LONGEST_HELD:
        return Tiles(1, _STEP, 8, held=False)
    rows = 1
    while rows * width < 1024 and rows * 2 * _UNITS <= _padded(loops.rows):
        rows *= 2
    each = 32 if loops.rows > 2 * _UNITS else 16 if width < _WIDE or loops.rows > _UNITS else 8  # of a thread
    return Tiles(rows, width, max(_warps(rows * width // each), min(4, _warps(rows * width // 8))))


def _turning(rows: int, columns: int) -> Tiles:
    """More warps where there are few programs: each then waits for less."""
    high, wide = min(_TURN[0], _padded(rows)), min(_TURN[1], _padded(columns))
    across = -(-columns // wide)
    few = -(-rows // high) * across <= 4 * _UNITS
    return Tiles(high, wide, _warps(high * wide // (8 if few else 16)), across=across)


def _flat(count: int) -> Tiles:
    """Eight elements a thread once the device is full, four before."""
    if count >= 1024 * _UNITS * 4:
        return Tiles(1024, 1, 4)
    block = 512
    while block > 128 and count < block * _UNITS:
        block //= 2
    return Tiles(min(block, _padded(count)), 1, _warps(min(block, _padded(count)) // 4))


def _warps(threads: int) -> int:
    return max(1, min(32, _padded(threads) // 32))


def _padded(size: int) -> int:
    return 1 << max(size - 1, 0).bit_length()
