# pyright: basic, reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false
# Kernel text: inside @gluon.jit, names are tensors and constants of a language whose types say little to a checker.
"""A row's winners in ascending index, each program's where those of the programs before it end."""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kimigraph.codegen.templates.cluster import everywhere
from kimigraph.codegen.templates.row_histogram import add
from kimigraph.codegen.templates.row_slices import keep, tile_codes, tile_positions
from kimigraph.codegen.templates.shared_counts import get_counts, get_note, set_count, set_note


@gluon.jit
def before_warp(totals, warp, first: gl.constexpr, WARPS: gl.constexpr):
    """The sums of the warps before each, of one number a warp, and the sum of all; WARPS notes from ``first`` on."""
    set_note(first + warp, totals)
    tl.debug_barrier()
    before = gl.zeros_like(totals)
    total = gl.to_tensor(0)
    for other in gl.static_range(WARPS):
        number = get_note(first + other)
        before += gl.where(warp > other, number, 0)
        total += number
    return before, total


@gluon.jit
def listed_ids(position, wins, table, TABLE_STRIDE: gl.constexpr):
    """What is listed for winners: their positions, or with the sequence's ``table`` of pages their cache rows."""
    ids = position
    if table is not None:
        place = table + (position >> 6).to(gl.int64) * TABLE_STRIDE
        page = gl.load(place, mask=wins, other=0, cache_modifier=".cg").to(gl.int32)
        ids = page * 64 + (position & 63)
    return ids


@gluon.jit
def list_winners(
    held, codes, kept, position, tiles, number, column, threshold, before, out, table, lane_place,
    TABLE_STRIDE: gl.constexpr, TILES: gl.constexpr, COLUMNS: gl.constexpr, WARPS: gl.constexpr, CTAS: gl.constexpr,
    LAYOUT: gl.constexpr, STAGED: gl.constexpr,
):  # fmt: skip
    """Write this slice's codes above the threshold, in ascending index, from ``before`` on: to shared memory if STAGED.
    Returns where they end."""
    warp = gl.arange(0, WARPS, layout=gl.SliceLayout(1, LAYOUT))
    totals = gl.sum(gl.zeros_like(position), 1)
    for tile in range(0, tiles):
        code = tile_codes(held, codes, position, tile, number, column, TILES, COLUMNS)
        totals += gl.sum((code > threshold).to(gl.int32), 1)
    warp_before, total = before_warp(totals, warp, 128, WARPS)
    warp_before += before - 1
    for tile in range(0, tiles):
        code = tile_codes(held, codes, position, tile, number, column, TILES, COLUMNS)
        wins = code > threshold
        rank = gl.expand_dims(warp_before, 1) + gl.associative_scan(wins.to(gl.int32), 1, add)
        ids = listed_ids(
            tile_positions(kept, position, tile, number, column, TILES, COLUMNS), wins, table, TABLE_STRIDE
        )
        if STAGED:
            set_count(gl.where(wins, rank, lane_place), ids)
        else:
            keep(out + rank, ids, wins, CTAS)
        if TILES > 1:
            warp_before += gl.sum(wins.to(gl.int32), 1)
    return before + total


@gluon.jit
def list_with_ties(
    held, codes, kept, position, tiles, number, column, threshold, ties, above_before, ties_before, out, table,
    TABLE_STRIDE: gl.constexpr, TILES: gl.constexpr, COLUMNS: gl.constexpr, WARPS: gl.constexpr, CTAS: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    """``list_winners`` where the first ``ties`` codes at the threshold win, too."""
    warp = gl.arange(0, WARPS, layout=gl.SliceLayout(1, LAYOUT))
    above_number = gl.sum(gl.zeros_like(position), 1)
    tie_number = gl.sum(gl.zeros_like(position), 1)
    for tile in range(0, tiles):
        code = tile_codes(held, codes, position, tile, number, column, TILES, COLUMNS)
        above_number += gl.sum((code > threshold).to(gl.int32), 1)
        tie_number += gl.sum((code == threshold).to(gl.int32), 1)
    warp_above, _ = before_warp(above_number, warp, 128, WARPS)
    warp_ties, _ = before_warp(tie_number, warp, 128 + WARPS, WARPS)
    warp_above += above_before - 1
    warp_ties += ties_before
    for tile in range(0, tiles):
        code = tile_codes(held, codes, position, tile, number, column, TILES, COLUMNS)
        above = (code > threshold).to(gl.int32)
        equal = (code == threshold).to(gl.int32)
        above_rank = gl.expand_dims(warp_above, 1) + gl.associative_scan(above, 1, add)
        tie_rank = gl.expand_dims(warp_ties, 1) + gl.associative_scan(equal, 1, add)
        wins = (code > threshold) | ((code == threshold) & (tie_rank <= ties))
        places = tile_positions(kept, position, tile, number, column, TILES, COLUMNS)
        ids = listed_ids(places, wins, table, TABLE_STRIDE)
        keep(out + (above_rank + gl.minimum(tie_rank, ties)), ids, wins, CTAS)
        warp_above += gl.sum(above, 1)
        warp_ties += gl.sum(equal, 1)


@gluon.jit
def write_staged(out, end, K: gl.constexpr, WARPS: gl.constexpr):
    """The first K counters, up to ``end``, then -1."""
    LAYOUT: gl.constexpr = everywhere([4], [32], [WARPS], 1)
    tl.debug_barrier()
    for start in gl.static_range(0, K, WARPS * 128):
        slot = start + gl.arange(0, WARPS * 128, layout=LAYOUT)
        gl.store(out + slot, gl.where(slot < end, get_counts(slot), -1), mask=slot < K)


@gluon.jit
def fill_rest(out, end, K: gl.constexpr, WARPS: gl.constexpr, CTAS: gl.constexpr):
    """-1 from ``end`` on."""
    LAYOUT: gl.constexpr = everywhere([1], [32], [WARPS], CTAS)
    for start in range(0, K, WARPS * 32):
        slot = start + gl.arange(0, WARPS * 32, layout=LAYOUT)
        keep(out + slot, gl.full([WARPS * 32], -1, gl.int32, layout=LAYOUT), (slot >= end) & (slot < K), CTAS)
