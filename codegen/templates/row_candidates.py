# pyright: basic, reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false
# Kernel text: inside @gluon.jit, names are tensors and constants of a language whose types say little to a checker.
"""The few codes among which a row is cut, and the exact place of the cut."""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kimigraph.codegen.templates.cluster import done_with_cluster, everywhere, meet_cluster
from kimigraph.codegen.templates.row_slices import tile_codes
from kimigraph.codegen.templates.shared_counts import append, listed, listed_by, listed_labels, note_of, set_note


@gluon.jit
def add_pairs(a, b, c, d):
    """For one reduction of two tensors."""
    return a + c, b + d


@gluon.jit
def list_candidates(
    held, codes, position, tiles, number, column, begin, last, TILES: gl.constexpr, COLUMNS: gl.constexpr
):
    """Put the slice's codes from ``begin`` to ``last`` into the first list, by their distance from ``begin``."""
    for tile in range(0, tiles):
        distance = tile_codes(held, codes, position, tile, number, column, TILES, COLUMNS) - begin
        append(distance.to(gl.int32, bitcast=True), position, (distance <= last - begin).to(gl.int32), 0)


@gluon.jit
def exchange_candidates(
    held, codes, position, tiles, number, column, begin, last, some, part, TILES: gl.constexpr,
    COLUMNS: gl.constexpr, CTAS: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Tell the other programs of the row how many codes of this slice lie above the range and in it, and if there are
    few (``some``) which; then put all into the second list, labelled with the program. Returns how many codes above
    the range and in it the programs before this one have."""
    ROW: gl.constexpr = everywhere([1], [32], [WARPS], CTAS)
    above = gl.zeros_like(position)
    at_least = gl.zeros_like(position)
    for tile in range(0, tiles):
        code = tile_codes(held, codes, position, tile, number, column, TILES, COLUMNS)
        above += (code > last).to(gl.int32)
        at_least += (code >= begin).to(gl.int32)
    by_warp = gl.reduce((above, at_least), 1, add_pairs)
    total_above, total = gl.reduce(by_warp, 0, add_pairs)
    set_note(64, total_above)
    set_note(65, total - total_above)
    if some:
        list_candidates(held, codes, position, tiles, number, column, begin, last, TILES, COLUMNS)
    meet_cluster()
    other = gl.arange(0, CTAS, layout=ROW)
    above_before = note_of(gl.zeros_like(other) + 64, other)
    ties_before = note_of(gl.zeros_like(other) + 65, other)
    if some:
        # At least a place a thread: one that several threads held would be put into the list by each.
        PLACES: gl.constexpr = CTAS * 128 if CTAS * 128 > WARPS * 32 else WARPS * 32
        every = gl.arange(0, PLACES, layout=ROW)
        program = every // 128 % CTAS
        distance = listed_by(every & 127, program)
        there = (every < CTAS * 128) & ((every & 127) < note_of(gl.zeros_like(every) + 65, program))
        append(distance, program, there.to(gl.int32), 1)
    done_with_cluster()
    return gl.sum(gl.where(other < part, above_before, 0), 0), gl.sum(gl.where(other < part, ties_before, 0), 0)


@gluon.jit
def settle(number, wanted, part, WARPS: gl.constexpr, CTAS: gl.constexpr):
    """Of ``number`` listed candidates: the last winner's distance, how many are larger and how many are equal, and how
    many of either belong to programs before ``part``."""
    SQUARE: gl.constexpr = everywhere([1, 4], [1, 32], [WARPS, 1], CTAS)
    OWN: gl.constexpr = gl.SliceLayout(1, SQUARE)
    RIVAL: gl.constexpr = gl.SliceLayout(0, SQUARE)
    WHICH: gl.constexpr = 1 if CTAS > 1 else 0
    tl.debug_barrier()
    place = gl.arange(0, 128, layout=RIVAL)
    rival = listed(place, WHICH).to(gl.uint32, bitcast=True)
    there = place < number
    final = gl.full([WARPS], 0xFFFFFFFF, gl.uint32, layout=OWN)
    for start in range(0, number, WARPS):
        own_place = gl.minimum(start + gl.arange(0, WARPS, layout=OWN), number - 1)
        own = listed(own_place, WHICH).to(gl.uint32, bitcast=True)
        beats = (gl.expand_dims(rival, 0) > gl.expand_dims(own, 1)) & gl.expand_dims(there, 0)
        # Of the distances with fewer than ``wanted`` larger ones the smallest is the last winner's.
        final = gl.where(gl.sum(beats.to(gl.int32), 1) < wanted, gl.minimum(final, own), final)
    final = gl.min(final, 0)
    marks = gl.where(there & (rival > final), 1, 0) + gl.where(there & (rival == final), 65536, 0)
    every = gl.sum(marks, 0)
    earlier = gl.sum(gl.where(listed_labels(place, WHICH) < part, marks, 0), 0)
    return final, every & 0xFFFF, every >> 16, earlier & 0xFFFF, earlier >> 16
