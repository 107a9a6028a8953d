# pyright: basic, reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false
# Kernel text: inside @gluon.jit, names are tensors and constants of a language whose types say little to a checker.
"""Exact top k of rows of order codes in memory, listed in ascending index: CTAS programs a row, each with its slice.

A warp owns neighbouring codes, TILES tiles of COLUMNS, EACH in a row a thread: what decides is how few instructions a
code takes. Codes are counted in shared memory by their place in a window of 16 binades below the row's largest
magnitude; a place with too many codes is split again. The few codes left at the place of the k-th become candidates,
which settle where the row is cut. Programs that share a row are a cluster and read one another's counters.
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kimigraph.codegen.templates.cluster import everywhere, rank_in_cluster, wait_for_cluster
from kimigraph.codegen.templates.indexer_scores import row_limit
from kimigraph.codegen.templates.launch_order import let_next_launch_start, wait_for_earlier_launch
from kimigraph.codegen.templates.row_candidates import exchange_candidates, list_candidates, settle
from kimigraph.codegen.templates.row_histogram import clear_counts, place_of_rank
from kimigraph.codegen.templates.row_listing import fill_rest, list_winners, list_with_ties, write_staged
from kimigraph.codegen.templates.row_slices import count_range, count_window, pack_slice
from kimigraph.codegen.templates.score_window import part_of_range, range_shift, window, window_range
from kimigraph.codegen.templates.shared_counts import declare_counts, empty_lists


@gluon.jit
def select_row(
    codes, peaks, lengths, table, kept, out, row, part,
    S: gl.constexpr, T: gl.constexpr, K: gl.constexpr, LENGTH_STRIDE: gl.constexpr, TABLE_STRIDE: gl.constexpr,
    SPLITS: gl.constexpr, CTAS: gl.constexpr, EACH: gl.constexpr, COLUMNS: gl.constexpr, TILES: gl.constexpr,
    SAMPLE: gl.constexpr,
):  # fmt: skip
    """A slice of the row; counters and lists are empty. ``done_with_cluster`` was said where there is one."""
    WARPS: gl.constexpr = gl.num_warps()
    LAYOUT: gl.constexpr = everywhere([1, EACH], [1, 32], [WARPS, 1], CTAS)
    EVERY: gl.constexpr = everywhere([SPLITS // 32 if SPLITS > 32 else 1], [32], [WARPS], CTAS)
    ENOUGH: gl.constexpr = 128
    STAGED: gl.constexpr = CTAS == 1 and K <= 4096
    warp = gl.expand_dims(gl.arange(0, WARPS, layout=gl.SliceLayout(1, LAYOUT)), 1)
    column = gl.expand_dims(gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, LAYOUT)), 0)
    lane_place = 4096 + ((column >> 3) & 31)
    position = part * (WARPS * COLUMNS * TILES) + warp * (COLUMNS * TILES) + column
    # All loads first; no barrier stands between them.
    held = position
    if TILES == 1:
        held = gl.load(codes + position, mask=position < T, other=0, cache_modifier=".cg")
    of_programs = gl.load(peaks + row * SPLITS + gl.arange(0, SPLITS, layout=EVERY), cache_modifier=".cg")
    high = (row_limit(lengths, row // S, row % S, T, LENGTH_STRIDE) + 63) // 64 * 64
    negative, positive = window(gl.max(of_programs, 0))
    held = gl.where(position < high, held, 0).to(gl.uint32, bitcast=True)
    tl.debug_barrier()
    wanted = gl.to_tensor(K)
    number = warp
    tiles = 1
    if TILES > 1:
        number = pack_slice(
            codes, kept, position, high, negative, positive, wanted, lane_place, T, TILES, COLUMNS, WARPS,
            CTAS, SAMPLE,
        )  # fmt: skip
        tiles = (gl.max(gl.max(number, 1), 0) + COLUMNS - 1) // COLUMNS
    count_window(held, codes, position, tiles, number, column, negative, positive, lane_place, TILES, COLUMNS)
    place, above, there = place_of_rank(wanted, WARPS, CTAS)
    begin, last = window_range(gl.maximum(place, 0), negative, positive)
    wanted = wanted - above
    short = place < 0
    if short:
        # Fewer than K keys are visible: all win.
        begin = gl.to_tensor(1).to(gl.uint32)
        last = gl.to_tensor(0).to(gl.uint32)
        wanted = gl.to_tensor(0)
        there = gl.to_tensor(0)
    while (there > ENOUGH) & (begin < last):
        shift = range_shift(begin, last)
        count_range(
            held, codes, position, tiles, number, column, begin, last, shift, lane_place, TILES, COLUMNS, WARPS, CTAS
        )
        place, above, there = place_of_rank(wanted, WARPS, CTAS)
        begin, last = part_of_range(place, shift, begin, last)
        wanted = wanted - above
    some = (there > wanted) & (begin < last)
    threshold = gl.where(there > wanted, begin, begin - 1)
    ties = gl.where(there > wanted, wanted, 0)
    above_before = gl.to_tensor(0)
    ties_before = gl.to_tensor(0)
    if CTAS > 1:
        above_before, ties_before = exchange_candidates(
            held, codes, position, tiles, number, column, begin, last, some, part, TILES, COLUMNS, CTAS, WARPS
        )  # fmt: skip
        if there <= wanted:
            above_before += ties_before
    else:
        if some:
            list_candidates(held, codes, position, tiles, number, column, begin, last, TILES, COLUMNS)
    if some:
        final, larger, equal, larger_before, equal_before = settle(there, wanted, part, WARPS, CTAS)
        threshold = begin + final
        ties = wanted - larger
        above_before += larger_before
        ties_before = equal_before
        if equal == ties:
            # No tie is cut: all from the last winner's code on win.
            threshold = threshold - 1
            ties = gl.to_tensor(0)
            above_before += equal_before
    if ties == 0:
        end = list_winners(
            held, codes, kept, position, tiles, number, column, threshold, above_before, out, table, lane_place,
            TABLE_STRIDE[1], TILES, COLUMNS, WARPS, CTAS, LAYOUT, STAGED,
        )  # fmt: skip
        if STAGED:
            write_staged(out, end, K, WARPS)
        else:
            if short & (part == CTAS - 1):
                fill_rest(out, end, K, WARPS, CTAS)
    else:
        list_with_ties(
            held, codes, kept, position, tiles, number, column, threshold, ties, above_before, ties_before, out, table,
            TABLE_STRIDE[1], TILES, COLUMNS, WARPS, CTAS, LAYOUT,
        )  # fmt: skip


@gluon.jit
def select_codes(
    codes, peaks, lengths, block_table, kept, picked,
    S: gl.constexpr, T: gl.constexpr, K: gl.constexpr, LENGTH_STRIDE: gl.constexpr, TABLE_STRIDE: gl.constexpr,
    SPLITS: gl.constexpr, CTAS: gl.constexpr, EACH: gl.constexpr, COLUMNS: gl.constexpr, TILES: gl.constexpr,
    SAMPLE: gl.constexpr,
):  # fmt: skip
    """One slice of one row; with ``block_table`` it lists rows of the flattened cache instead of positions."""
    WARPS: gl.constexpr = gl.num_warps()
    declare_counts()
    let_next_launch_start()
    part = gl.to_tensor(0)
    if CTAS > 1:
        part = rank_in_cluster()
    row = gl.program_id(0).to(gl.int64)
    codes += row * T
    kept += row * T
    out = picked + row * K
    clear_counts(WARPS, CTAS)
    empty_lists()
    table = None
    if block_table is not None:
        table = block_table + (row // S) * TABLE_STRIDE[0]
    wait_for_earlier_launch()
    select_row(
        codes, peaks, lengths, table, kept, out, row, part, S, T, K, LENGTH_STRIDE, TABLE_STRIDE, SPLITS, CTAS, EACH,
        COLUMNS, TILES, SAMPLE,
    )  # fmt: skip
    if CTAS > 1:
        wait_for_cluster()
