# pyright: basic
# Kernel text: inside @triton.jit, names are tensors of a language that type checkers do not know.
"""Columns of a few rows times a weight [COLUMNS, DEPTH]: pieces of a kernel whose programs share a table of tiles.

A weight is read once, in the order in which it lies; rows are few, so that the weight's bytes decide.
"""

import triton
import triton.language as tl

from kimigraph.codegen.templates.rounding import narrow


@triton.jit
def one_row(tile, rows, weight, out, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, TILE: tl.constexpr,
            STEP: tl.constexpr, INTERPRET: tl.constexpr):  # fmt: skip
    """TILE columns of one row; every lane sums its own elements, all lanes together at the end."""
    column = tile * TILE + tl.arange(0, TILE)
    inside = column < COLUMNS
    places = weight + column.to(tl.int64)[:, None] * DEPTH
    total = tl.zeros([TILE, STEP], tl.float32)
    for start in range(0, DEPTH, STEP):
        depth = start + tl.arange(0, STEP)
        if DEPTH % STEP == 0:
            x = tl.load(rows + depth)
            w = tl.load(places + depth[None, :], mask=inside[:, None], other=0.0, eviction_policy="evict_first")
        else:
            x = tl.load(rows + depth, mask=depth < DEPTH, other=0.0)
            mask = inside[:, None] & (depth < DEPTH)[None, :]
            w = tl.load(places + depth[None, :], mask=mask, other=0.0, eviction_policy="evict_first")
        total += w.to(tl.float32) * x.to(tl.float32)[None, :]
    tl.store(out + column, narrow(tl.sum(total, 1), out, INTERPRET), mask=inside)


@triton.jit
def few_rows(tile, rows, weight, out, ROWS: tl.constexpr, ROW_STRIDE: tl.constexpr, COLUMNS: tl.constexpr,
             DEPTH: tl.constexpr, LINES: tl.constexpr, STEP: tl.constexpr, INTERPRET: tl.constexpr):  # fmt: skip
    """One column of up to LINES rows, in fp32 without matrix units."""
    line = tl.arange(0, LINES)
    places = weight + tile.to(tl.int64) * DEPTH
    total = tl.zeros([LINES, STEP], tl.float32)
    for start in range(0, DEPTH, STEP):
        depth = start + tl.arange(0, STEP)
        w = tl.load(places + depth, mask=depth < DEPTH, other=0.0, eviction_policy="evict_first")
        mask = (line < ROWS)[:, None] & (depth < DEPTH)[None, :]
        x = tl.load(rows + line[:, None] * ROW_STRIDE + depth[None, :], mask=mask, other=0.0)
        total += x.to(tl.float32) * w.to(tl.float32)[None, :]
    tl.store(out + line * COLUMNS + tile, narrow(tl.sum(total, 1), out, INTERPRET), mask=line < ROWS)


@triton.jit
def few_rows_dot(tile, rows, weight, out, ROWS: tl.constexpr, ROW_STRIDE: tl.constexpr, COLUMNS: tl.constexpr,
                 DEPTH: tl.constexpr, TILE: tl.constexpr, LINES: tl.constexpr, STEP: tl.constexpr,
                 INTERPRET: tl.constexpr):  # fmt: skip
    """TILE columns of up to LINES rows by matrix units, which take the weight as the left operand."""
    column = tile * TILE + tl.arange(0, TILE)
    inside = column < COLUMNS
    line = tl.arange(0, LINES)
    places = weight + column.to(tl.int64)[:, None] * DEPTH
    total = tl.zeros([TILE, LINES], tl.float32)
    for start in range(0, DEPTH, STEP):
        depth = start + tl.arange(0, STEP)
        mask = inside[:, None] & (depth < DEPTH)[None, :]
        w = tl.load(places + depth[None, :], mask=mask, other=0.0, eviction_policy="evict_first")
        mask = (depth < DEPTH)[:, None] & (line < ROWS)[None, :]
        x = tl.load(rows + line[None, :] * ROW_STRIDE + depth[:, None], mask=mask, other=0.0)
        if INTERPRET:
            total = tl.dot(w.to(tl.float32), x.to(tl.float32), total, input_precision="ieee")
        else:
            total = tl.dot(w, x, total)
    mask = inside[:, None] & (line < ROWS)[None, :]
    tl.store(out + line[None, :] * COLUMNS + column[:, None], narrow(total, out, INTERPRET), mask=mask)
