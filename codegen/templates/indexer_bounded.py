# pyright: basic, reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false
# Kernel text: inside @gluon.jit, names are tensors and constants of a language whose types say little to a checker.
"""Exact top k of rows of order codes of which the largest of each group of keys is known: the k-th of these bounds the
row's k-th code from below, so that few are left. The row's programs, a cluster, pool them, in no particular order; the
first cuts all pools exactly and lists the winners in ascending index, a bit for each position.

A row of which too many codes reach the bound is selected from as in ``indexer_selection``.
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kimigraph.codegen.templates.cluster import (
    everywhere,
    leave_cluster,
    meet_cluster,
    rank_in_cluster,
    wait_for_cluster,
)
from kimigraph.codegen.templates.few_codes import (
    codes_of_pools,
    count_between,
    empty_pool,
    few_shift,
    list_winners_of,
    number_in_pools,
    place_in_window,
    pool_slice,
    tops_of_row,
)
from kimigraph.codegen.templates.indexer_scores import row_limit
from kimigraph.codegen.templates.indexer_selection import select_row
from kimigraph.codegen.templates.launch_order import let_next_launch_start, wait_for_earlier_launch
from kimigraph.codegen.templates.row_histogram import clear_counts
from kimigraph.codegen.templates.row_slices import load_codes
from kimigraph.codegen.templates.shared_counts import empty_lists
from kimigraph.codegen.templates.shared_pool import declare_pool


@gluon.jit
def select_bounded(
    codes, tops, peaks, lengths, block_table, kept, picked,
    S: gl.constexpr, T: gl.constexpr, K: gl.constexpr, LENGTH_STRIDE: gl.constexpr, TABLE_STRIDE: gl.constexpr,
    SPLITS: gl.constexpr, CTAS: gl.constexpr, EACH: gl.constexpr, COLUMNS: gl.constexpr, TILES: gl.constexpr,
    SAMPLE: gl.constexpr, TOPS: gl.constexpr, TOP_TILES: gl.constexpr, GROUPS: gl.constexpr, POOL: gl.constexpr,
    MARKS: gl.constexpr,
):  # fmt: skip
    """A slice of one row. A warp looks at GROUPS of its TOPS tops; MARKS words hold a bit for each of T positions."""
    WARPS: gl.constexpr = gl.num_warps()
    LAYOUT: gl.constexpr = everywhere([1, EACH], [1, 32], [WARPS, 1], CTAS)
    declare_pool()
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
    empty_pool(POOL, WARPS, CTAS)
    warp = gl.expand_dims(gl.arange(0, WARPS, layout=gl.SliceLayout(1, LAYOUT)), 1)
    column = gl.expand_dims(gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, LAYOUT)), 0)
    # Programs take turns at every eight codes: winners that stand together fill no single pool.
    position = ((warp * (COLUMNS // 8) + column // 8) * CTAS + part) * 8 + column % 8
    table = None
    if block_table is not None:
        table = block_table + (row // S) * TABLE_STRIDE[0]
    tl.debug_barrier()
    wait_for_earlier_launch()
    high = (row_limit(lengths, row // S, row % S, T, LENGTH_STRIDE) + 63) // 64 * 64
    top, index = tops_of_row(tops + row * TOPS, high, TOPS, GROUPS, SPLITS, TOP_TILES, WARPS, CTAS)
    code = load_codes(codes, position, high, True, T)
    place, _, _, begin, _, peak = place_in_window(top, index, K, WARPS, CTAS)
    # The k-th of the tops bounds the row's k-th code from below, if there are so many.
    bound = gl.where(place < 0, 1, begin).to(gl.uint32)
    pool_slice(codes, code, position, bound, high, T, TILES, WARPS * COLUMNS * CTAS)
    meet_row(CTAS)
    number, fit = number_in_pools(POOL, WARPS, CTAS)
    if fit:
        if part == 0:
            pooled, at, slot = codes_of_pools(POOL, WARPS, CTAS)
            shift = few_shift(bound, peak)
            count_between(pooled, bound, peak, shift, slot, WARPS, CTAS)
            leave_row(CTAS)
            list_winners_of(
                pooled, at, slot, number, bound, peak, shift, out, table, K, TABLE_STRIDE[1], MARKS, WARPS, CTAS
            )
        else:
            leave_row(CTAS)
        if CTAS > 1:
            wait_for_cluster()
    else:
        leave_row(CTAS)
        if CTAS > 1:
            wait_for_cluster()
        tl.debug_barrier()
        clear_counts(WARPS, CTAS)
        empty_lists()
        select_row(
            codes, peaks, lengths, table, kept, out, row, part, S, T, K, LENGTH_STRIDE, TABLE_STRIDE, SPLITS, CTAS,
            EACH, COLUMNS, TILES, SAMPLE,
        )  # fmt: skip
        if CTAS > 1:
            wait_for_cluster()


@gluon.jit
def meet_row(CTAS: gl.constexpr):
    """Wait for all threads of the row's programs."""
    if CTAS > 1:
        meet_cluster()
    else:
        tl.debug_barrier()


@gluon.jit
def leave_row(CTAS: gl.constexpr):
    """This thread reads nothing more of other programs, and has computed with what it read."""
    if CTAS > 1:
        leave_cluster()
    else:
        tl.debug_barrier()
