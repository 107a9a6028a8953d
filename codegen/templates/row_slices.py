# pyright: basic, reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false
# Kernel text: inside @gluon.jit, names are tensors and constants of a language whose types say little to a checker.
"""A program's slice of a row of codes: where its tiles come from, and counting them.

A slice of one tile stays in registers. Of a longer one the first tiles bound the k-th code from below, and what reaches
the bound is packed: codes in place, positions into ``kept``.
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kimigraph.codegen.templates.cluster import meet_cluster, put
from kimigraph.codegen.templates.row_histogram import add, clear_counts, place_of_rank
from kimigraph.codegen.templates.score_window import window_place, window_range
from kimigraph.codegen.templates.shared_counts import count


@gluon.jit
def load_codes(codes, position, high, live, T: gl.constexpr):
    """Codes at some positions; what lies from ``high`` on was not written. Does not wait for ``high``."""
    code = gl.load(codes + position, mask=(position < T) & live, other=0, cache_modifier=".cg")
    return gl.where(position < high, code, 0).to(gl.uint32, bitcast=True)


@gluon.jit
def tile_codes(held, codes, position, tile, number, column, TILES: gl.constexpr, COLUMNS: gl.constexpr):
    """A tile of the slice: what is ``held`` of a slice of one tile, else of the ``number`` codes that a warp packed."""
    code = held
    if TILES > 1:
        packed = gl.load(
            codes + position + tile * COLUMNS, mask=tile * COLUMNS + column < number, other=0, cache_modifier=".cg"
        )
        code = packed.to(gl.uint32, bitcast=True)
    return code


@gluon.jit
def tile_positions(kept, position, tile, number, column, TILES: gl.constexpr, COLUMNS: gl.constexpr):
    """The positions of ``tile_codes``."""
    place = position
    if TILES > 1:
        place = gl.load(
            kept + position + tile * COLUMNS, mask=tile * COLUMNS + column < number, other=0, cache_modifier=".cg"
        )
    return place


@gluon.jit
def keep(place, value, live, CTAS: gl.constexpr):
    """Store for this program."""
    if CTAS > 1:
        put(place, value, live)
    else:
        gl.store(place, value, mask=live)


@gluon.jit
def clear_between(WARPS: gl.constexpr, CTAS: gl.constexpr):
    """Clear the counters once nobody reads them any more; the next counts may follow."""
    if CTAS > 1:
        meet_cluster()
    else:
        tl.debug_barrier()
    clear_counts(WARPS, CTAS)
    tl.debug_barrier()


@gluon.jit
def pack_slice(
    codes, kept, position, high, negative, positive, wanted, lane_place, T: gl.constexpr, TILES: gl.constexpr,
    COLUMNS: gl.constexpr, WARPS: gl.constexpr, CTAS: gl.constexpr, SAMPLE: gl.constexpr,
):  # fmt: skip
    """Pack the codes that may win, and their positions, at the start of each warp's part; returns how many [WARPS, 1].

    The ``wanted``-th largest of the first SAMPLE tiles of all parts bounds the row's from below.
    """
    for tile in range(0, SAMPLE):
        code = load_codes(codes, position + tile * COLUMNS, high, True, T)
        count(gl.where(code != 0, window_place(code, negative, positive), lane_place))
    place, _, _ = place_of_rank(wanted, WARPS, CTAS)
    bound, _ = window_range(place, negative, positive)
    bound = gl.where(place >= 0, bound, 1)
    clear_between(WARPS, CTAS)
    number = gl.sum(gl.zeros_like(position), 1)
    begin = gl.min(position, 1)
    code = load_codes(codes, position, high, True, T)
    for tile in range(0, TILES):
        here = code
        code = load_codes(codes, position + (tile + 1) * COLUMNS, high, tile + 1 < TILES, T)
        stays = here >= bound
        running = gl.associative_scan(stays.to(gl.int32), 1, add)
        target = gl.expand_dims(begin + number, 1) + running - 1
        keep(codes + target, here.to(gl.int32, bitcast=True), stays, CTAS)
        keep(kept + target, position + tile * COLUMNS, stays, CTAS)
        number += gl.sum(stays.to(gl.int32), 1)
    tl.debug_barrier()
    return gl.expand_dims(number, 1)


@gluon.jit
def count_window(
    held, codes, position, tiles, number, column, negative, positive, lane_place, TILES: gl.constexpr,
    COLUMNS: gl.constexpr,
):  # fmt: skip
    """Count the slice's codes by their places in the window."""
    for tile in range(0, tiles):
        code = tile_codes(held, codes, position, tile, number, column, TILES, COLUMNS)
        count(gl.where(code != 0, window_place(code, negative, positive), lane_place))


@gluon.jit
def count_range(
    held, codes, position, tiles, number, column, begin, last, shift, lane_place, TILES: gl.constexpr,
    COLUMNS: gl.constexpr, WARPS: gl.constexpr, CTAS: gl.constexpr,
):  # fmt: skip
    """Count the slice's codes from ``begin`` to ``last``, in places of 2 ** shift codes."""
    clear_between(WARPS, CTAS)
    for tile in range(0, tiles):
        code = tile_codes(held, codes, position, tile, number, column, TILES, COLUMNS)
        count(gl.where((code >= begin) & (code <= last), ((last - code) >> shift).to(gl.int32), lane_place))
