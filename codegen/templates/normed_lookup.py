# pyright: basic
# Kernel text: inside @triton.jit, names are tensors of a language that type checkers do not know.
"""Up to eight rows of a table, their RMS norm, and the product of the normed rows with a weight, in one launch.

The first programs norm a row each, all programs wait for these rows, then each multiplies its own columns. Those that
wait do so for programs of a lower number alone, which a GPU starts before them; so they need not all run at once.
"""

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton import knobs

from kimigraph.codegen.templates.meeting import row_state
from kimigraph.codegen.templates.rounding import narrow

CONSTANTS: dict[str, Any] = {}
INTERPRET = knobs.runtime.interpret


@triton.jit
def count_at(counter, INTERPRET: tl.constexpr):
    """What ``counter`` [1] int64 says; what was written before it came to that can be read afterwards."""
    if INTERPRET:
        count = tl.load(counter)
    else:
        count = tl.inline_asm_elementwise(
            "ld.acquire.gpu.global.b64 $0, [$1];", "=l,l", [counter], dtype=tl.int64, is_pure=False, pack=1
        )
    return count


@triton.jit
def norm_row(table, places, norm, found, rows, number, DEPTH: tl.constexpr, BLOCK: tl.constexpr, EPS: tl.constexpr,
             ROUNDS_FIRST: tl.constexpr, INTERPRET: tl.constexpr):  # fmt: skip
    """Row ``number``, as it is to ``found``, normed to ``rows``."""
    depth = tl.arange(0, BLOCK)
    inside = depth < DEPTH
    row = tl.load(places + number).to(tl.int64)
    factor = tl.load(norm + depth, mask=inside, other=0.0).to(tl.float32)
    x = tl.load(table + row * DEPTH + depth, mask=inside, other=0.0)
    tl.store(found + number * DEPTH + depth, x, mask=inside)
    wide = x.to(tl.float32)
    wide *= tl.rsqrt(tl.sum(wide * wide, 0) * (1.0 / DEPTH) + EPS)
    if ROUNDS_FIRST:
        wide = narrow(wide, table, INTERPRET).to(tl.float32)
    tl.store(rows + number * DEPTH + depth, narrow(wide * factor, table, INTERPRET), mask=inside)


@triton.jit
def normed_lookup_dot(table, places, norm, weight, found, out, rows, counts, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
                      DEPTH: tl.constexpr, PROGRAMS: tl.constexpr, TILE: tl.constexpr, LINES: tl.constexpr,
                      STEP: tl.constexpr, BLOCK: tl.constexpr, EPS: tl.constexpr, ROUNDS_FIRST: tl.constexpr,
                      INTERPRET: tl.constexpr):  # fmt: skip
    """TILE columns of all rows; ``found`` gets the rows themselves, ``rows`` the normed ones.

    ``counts`` [2] int64 only grow: rows that were normed and programs that have ended, of all launches so far.
    """
    program = tl.program_id(0)
    wanted = (count_at(counts + 1, INTERPRET) // PROGRAMS + 1) * ROWS
    if INTERPRET:  # one program after the other: none can wait for a later one
        first, every = program * ROWS, 1
    else:
        first, every = program, PROGRAMS
    for number in range(first, ROWS, every):
        norm_row(table, places, norm, found, rows, number, DEPTH, BLOCK, EPS, ROUNDS_FIRST, INTERPRET)
        tl.debug_barrier()
        tl.atomic_add(counts, 1, sem="release", scope="gpu")
    while count_at(counts, INTERPRET) < wanted:
        pass
    column = program * TILE + tl.arange(0, TILE)
    inside = column < COLUMNS
    line = tl.arange(0, LINES)
    lying = weight + column.to(tl.int64)[:, None] * DEPTH
    total = tl.zeros([TILE, LINES], tl.float32)
    for start in range(0, DEPTH, STEP):
        depth = start + tl.arange(0, STEP)
        mask = inside[:, None] & (depth < DEPTH)[None, :]
        w = tl.load(lying + depth[None, :], mask=mask, other=0.0, eviction_policy="evict_first")
        mask = (depth < DEPTH)[:, None] & (line < ROWS)[None, :]
        x = tl.load(rows + line[None, :] * DEPTH + depth[:, None], mask=mask, other=0.0, cache_modifier=".cg")
        if INTERPRET:
            total = tl.dot(w.to(tl.float32), x.to(tl.float32), total, input_precision="ieee")
        else:
            total = tl.dot(w, x, total)
    mask = inside[:, None] & (line < ROWS)[None, :]
    tl.store(out + line[None, :] * COLUMNS + column[:, None], narrow(total, out, INTERPRET), mask=mask)
    tl.atomic_add(counts + 1, 1, sem="relaxed", scope="gpu")


@cache
def states(device):
    """Counters of rows and of programs, by stream."""
    del device
    return {}


def look_up(table, places, norm, weight, *, memory=torch):
    """The rows, and the product of the normed rows, in the region's shapes."""
    sizes = CONSTANTS["sizes"]
    like = {"dtype": table.dtype, "device": table.device}
    found, out = memory.empty(sizes["found"], **like), memory.empty(sizes["out"], **like)
    rows = memory.empty(sizes["rows"], **like)
    counts = row_state(states(table.device), 4, table.device).view(torch.int64)
    normed_lookup_dot[CONSTANTS["grid"]](
        table, places, norm, weight, found, out, rows, counts,
        **{**CONSTANTS["normed_lookup_dot"], "INTERPRET": INTERPRET}, **CONSTANTS["options"],
    )  # fmt: skip
    return found, out
