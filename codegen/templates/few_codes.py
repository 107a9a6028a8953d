# pyright: basic, reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false
# Kernel text: inside @gluon.jit, names are tensors and constants of a language whose types say little to a checker.
"""Cutting few codes exactly and listing the winners, and what brings them down to few: a bound that only they reach.

Of equal codes the lower position is the larger, which makes the last winner one code.
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kimigraph.codegen.templates.cluster import everywhere
from kimigraph.codegen.templates.row_histogram import add
from kimigraph.codegen.templates.row_listing import before_warp, fill_rest, listed_ids
from kimigraph.codegen.templates.row_slices import keep, load_codes
from kimigraph.codegen.templates.score_window import part_of_range
from kimigraph.codegen.templates.shared_counts import (
    append,
    count,
    count_of,
    get_counts,
    get_note,
    listed,
    listed_labels,
    note_three,
    set_counts,
    set_note,
)
from kimigraph.codegen.templates.shared_pool import get_word, highest_bit, mark, ones, put_in_pool, reserve, reserved_by


@gluon.jit
def words_in_turn(NUMBER: gl.constexpr, WARPS: gl.constexpr, CTAS: gl.constexpr):
    """The first words of the memory, four in a row a thread."""
    return gl.arange(0, NUMBER, layout=everywhere([4], [32], [WARPS], CTAS))


@gluon.jit
def words_by_warp(NUMBER: gl.constexpr, WARPS: gl.constexpr, CTAS: gl.constexpr):
    """The same [WARPS, NUMBER / WARPS]: what stands before a word in its own warp is no other warp's business."""
    LAYOUT: gl.constexpr = everywhere([1, 4], [1, 32], [WARPS, 1], CTAS)
    warp = gl.expand_dims(gl.arange(0, WARPS, layout=gl.SliceLayout(1, LAYOUT)), 1)
    return warp * (NUMBER // WARPS) + gl.expand_dims(gl.arange(0, NUMBER // WARPS, layout=gl.SliceLayout(0, LAYOUT)), 0)


@gluon.jit
def sums_before(numbers, WARPS: gl.constexpr, CTAS: gl.constexpr):
    """For each number at ``words_by_warp`` the sum of those before it; takes notes from 128 on."""
    LAYOUT: gl.constexpr = everywhere([1, 4], [1, 32], [WARPS, 1], CTAS)
    warp = gl.arange(0, WARPS, layout=gl.SliceLayout(1, LAYOUT))
    running = gl.associative_scan(numbers, 1, add)
    before, _ = before_warp(gl.sum(numbers, 1), warp, 128, WARPS)
    return gl.expand_dims(before, 1) + running - numbers


@gluon.jit
def few_shift(begin, last):
    """How far the distances in a range are to be shifted so that they fall into 2048 places."""
    return gl.maximum(highest_bit((last - begin).to(gl.int32, bitcast=True) | 1) - 10, 0)


@gluon.jit
def place_of_few(wanted, WARPS: gl.constexpr, CTAS: gl.constexpr):
    """The place of the ``wanted``-th code that this program counted in 2048 counters, how many codes stand in the
    places before it, and how many in it. The place is -1 where it counted fewer."""
    places = words_in_turn(2048, WARPS, CTAS)
    set_note(gl.to_tensor(0), gl.to_tensor(-1))
    set_note(gl.to_tensor(1), gl.to_tensor(0))
    set_note(gl.to_tensor(2), gl.to_tensor(0))
    tl.debug_barrier()
    counts = get_counts(places)
    at_least = gl.associative_scan(counts, 0, add)
    before = at_least - counts
    # One thread tells all.
    note_three((at_least >= wanted) & (before < wanted), places, before, counts)
    tl.debug_barrier()
    return get_note(gl.to_tensor(0)), get_note(gl.to_tensor(1)), get_note(gl.to_tensor(2))


@gluon.jit
def place_in_window(code, column, wanted, WARPS: gl.constexpr, CTAS: gl.constexpr):
    """Where the ``wanted``-th of the codes that are not 0 stands among 2048 places of 2 ** 16 codes below the largest,
    16 binades; the last holds the rest. As ``place_of_few``, then the first and the last code of the place, and the
    largest of all. Counters are 0."""
    peak = gl.max(gl.max(code, 1), 0)
    place = gl.minimum((peak - code) >> 16, 2047).to(gl.int32)
    count(gl.where(code != 0, place, 2048 + (column & 31)))
    place, above, there = place_of_few(wanted, WARPS, CTAS)
    span = gl.maximum(place, 0).to(gl.uint32) << 16
    last = peak - span
    ends = (place < 2047) & (last > 65535)
    begin = gl.where(ends, last - 65535, 1).to(gl.uint32)
    return place, above, there, begin, last, peak


@gluon.jit
def tops_of_row(
    tops, high, TOPS: gl.constexpr, GROUPS: gl.constexpr, SPLITS: gl.constexpr, TOP_TILES: gl.constexpr,
    WARPS: gl.constexpr, CTAS: gl.constexpr,
):  # fmt: skip
    """The largest codes of TOPS groups of keys, which the scores left in memory, [WARPS, GROUPS]; 0 for a group of
    which no tile begins below ``high``."""
    EACH: gl.constexpr = 4 if GROUPS >= 128 else GROUPS // 32
    LAYOUT: gl.constexpr = everywhere([1, EACH], [1, 32], [WARPS, 1], CTAS)
    warp = gl.expand_dims(gl.arange(0, WARPS, layout=gl.SliceLayout(1, LAYOUT)), 1)
    column = gl.expand_dims(gl.arange(0, GROUPS, layout=gl.SliceLayout(0, LAYOUT)), 0)
    place = warp * GROUPS + column
    top = gl.load(tops + place, mask=place < TOPS, other=0, cache_modifier=".cg")
    program = place // 4
    tile = program % SPLITS + program // SPLITS * (SPLITS * TOP_TILES)
    return gl.where((tile * 64 < high) & (place < TOPS), top, 0).to(gl.uint32, bitcast=True), column


@gluon.jit
def pool_slice(codes, first, position, bound, high, T: gl.constexpr, TILES: gl.constexpr, STEP: gl.constexpr):
    """Put the codes of the slice that reach the bound into the pool; the slice's tiles lie STEP codes apart."""
    code = first
    for tile in range(0, TILES):
        here = code
        at = position + tile * STEP
        if TILES > 1:
            code = load_codes(codes, at + STEP, high, tile + 1 < TILES, T)
        stays = here >= bound
        running = gl.associative_scan(stays.to(gl.int32), 1, add)
        begin = reserve(gl.sum(stays.to(gl.int32), 1))
        put_in_pool(gl.expand_dims(begin, 1) + running - 1, here.to(gl.int32, bitcast=True), at, stays)


@gluon.jit
def count_between(code, begin, last, shift, column, WARPS: gl.constexpr, CTAS: gl.constexpr):
    """Count the codes from ``begin`` to ``last`` by their distance from the latter, in places of 2 ** shift."""
    places = words_in_turn(2048, WARPS, CTAS)
    tl.debug_barrier()
    set_counts(places, gl.zeros_like(places))
    tl.debug_barrier()
    inside = (code >= begin) & (code <= last)
    count(gl.where(inside, ((last - code) >> shift).to(gl.int32), 2048 + (column & 31)))


@gluon.jit
def empty_pool(POOL: gl.constexpr, WARPS: gl.constexpr, CTAS: gl.constexpr):
    """No code in the program's part of the pool."""
    words = words_in_turn(POOL // CTAS if POOL > 128 * CTAS else 128, WARPS, CTAS)
    set_counts(2112 + words, gl.zeros_like(words))


@gluon.jit
def number_in_pools(POOL: gl.constexpr, WARPS: gl.constexpr, CTAS: gl.constexpr):
    """How many codes the row's programs pooled, and whether each has room for its own."""
    EACH: gl.constexpr = everywhere([1], [32], [WARPS], CTAS)
    number = reserved_by(gl.arange(0, CTAS, layout=EACH))
    return gl.sum(number, 0), gl.max(number, 0) <= POOL // CTAS


@gluon.jit
def codes_of_pools(POOL: gl.constexpr, WARPS: gl.constexpr, CTAS: gl.constexpr):
    """The codes that the row's programs pooled, 0 where there is none, and their positions. Who has computed with all
    of the former has read all."""
    EACH: gl.constexpr = POOL // WARPS
    LAYOUT: gl.constexpr = everywhere([1, 1], [1, 32], [WARPS, 1], CTAS)
    warp = gl.expand_dims(gl.arange(0, WARPS, layout=gl.SliceLayout(1, LAYOUT)), 1)
    column = gl.expand_dims(gl.arange(0, EACH, layout=gl.SliceLayout(0, LAYOUT)), 0)
    index = warp * EACH + column
    program, place = index // (POOL // CTAS), index % (POOL // CTAS)
    code = count_of(2112 + place, program)
    position = count_of(6208 + place, program)
    # No code has such a position: the condition makes who computes with a code wait for its position, too.
    return gl.where(position < 0, 0, code).to(gl.uint32, bitcast=True), position, column


@gluon.jit
def cut_in_place(
    code, position, column, place, above, there, begin, last, wanted, MARKS: gl.constexpr, WARPS: gl.constexpr,
    CTAS: gl.constexpr,
):  # fmt: skip
    """The code and the position of the last winner, which is one of the ``there`` codes from ``begin`` to ``last``;
    ``above`` are larger. Where ``place`` is below 0 there are fewer than ``wanted`` codes, and all win."""
    wanted = gl.to_tensor(wanted) - above
    if place < 0:
        begin = gl.to_tensor(1).to(gl.uint32)
        there = gl.to_tensor(0)
        wanted = gl.to_tensor(0)
    while (there > 128) & (begin < last):
        shift = few_shift(begin, last)
        count_between(code, begin, last, shift, column, WARPS, CTAS)
        place, above, there = place_of_few(wanted, WARPS, CTAS)
        begin, last = part_of_range(place, shift, begin, last)
        wanted = wanted - above
    cut = begin
    cut_position = gl.to_tensor(0x7FFFFFFF)
    if there > wanted:
        inside = (code >= begin) & (code <= last)
        if there <= 128:
            append((code - begin).to(gl.int32, bitcast=True), position, inside.to(gl.int32), 0)
            distance, cut_position = last_winner(there, wanted, WARPS, CTAS)
            cut = begin + distance
        else:
            # Equal codes: the lowest positions win.
            rank = rank_by_position(position, inside, MARKS, WARPS, CTAS)
            cut_position = gl.max(gl.max(gl.where(inside & (rank < wanted), position, 0), 1), 0)
    return cut, cut_position


@gluon.jit
def last_winner(number, wanted, WARPS: gl.constexpr, CTAS: gl.constexpr):
    """Of ``number`` listed codes the ``wanted``-th largest: its distance from where the list begins, its position."""
    SQUARE: gl.constexpr = everywhere([1, 4], [1, 32], [WARPS, 1], CTAS)
    tl.debug_barrier()
    place = gl.expand_dims(gl.arange(0, 128, layout=gl.SliceLayout(0, SQUARE)), 0)
    rival, rival_position = listed(place, 0).to(gl.uint32, bitcast=True), listed_labels(place, 0)
    row = gl.arange(0, WARPS, layout=gl.SliceLayout(1, SQUARE))
    for start in range(0, number, WARPS):
        own_place = gl.expand_dims(start + row, 1)
        own = listed(gl.minimum(own_place, number - 1), 0).to(gl.uint32, bitcast=True)
        own_position = listed_labels(gl.minimum(own_place, number - 1), 0)
        larger = (rival > own) | ((rival == own) & (rival_position < own_position))
        before = gl.sum((larger & (place < number)).to(gl.int32), 1)
        last = gl.expand_dims((before == wanted - 1) & (start + row < number), 1)
        set_note(gl.where(last, 3, 64 + own_place % 64), own.to(gl.int32, bitcast=True))
        set_note(gl.where(last, 4, 64 + own_place % 64), own_position)
    tl.debug_barrier()
    return get_note(gl.to_tensor(3)).to(gl.uint32, bitcast=True), get_note(gl.to_tensor(4))


@gluon.jit
def rank_by_position(position, live, MARKS: gl.constexpr, WARPS: gl.constexpr, CTAS: gl.constexpr):
    """How many of the positions that are ``live`` are lower, for each of them; the memory's words are overwritten."""
    words = words_by_warp(MARKS, WARPS, CTAS)
    tl.debug_barrier()
    set_counts(words, gl.zeros_like(words))
    tl.debug_barrier()
    mark(position, live)
    tl.debug_barrier()
    set_counts(MARKS + words, sums_before(ones(get_counts(words)), WARPS, CTAS))
    tl.debug_barrier()
    word = gl.where(live, position >> 5, 0)
    return get_word(MARKS + word) + ones(get_word(word) & ((1 << (position & 31)) - 1))


@gluon.jit
def list_from_cut(
    code, position, cut, cut_position, number, out, table, K: gl.constexpr, TABLE_STRIDE: gl.constexpr,
    MARKS: gl.constexpr, WARPS: gl.constexpr, CTAS: gl.constexpr,
):  # fmt: skip
    """Write the winners in ascending position, then -1 if there are but ``number`` codes."""
    wins = (code > cut) | ((code == cut) & (position <= cut_position))
    rank = rank_by_position(position, wins, MARKS, WARPS, CTAS)
    keep(out + rank, listed_ids(position, wins, table, TABLE_STRIDE), wins, CTAS)
    if number < K:
        fill_rest(out, number, K, WARPS, CTAS)


@gluon.jit
def list_winners_of(
    code, position, column, number, bound, peak, shift, out, table, wanted: gl.constexpr, TABLE_STRIDE: gl.constexpr,
    MARKS: gl.constexpr, WARPS: gl.constexpr, CTAS: gl.constexpr,
):  # fmt: skip
    """Write the ``wanted`` largest of ``number`` codes from ``bound`` to ``peak``, in ascending position. They are
    counted, in places of 2 ** shift."""
    place, above, there = place_of_few(wanted, WARPS, CTAS)
    begin, last = part_of_range(gl.maximum(place, 0), shift, bound, peak)
    cut, cut_position = cut_in_place(
        code, position, column, place, above, there, begin, last, wanted, MARKS, WARPS, CTAS
    )
    list_from_cut(code, position, cut, cut_position, number, out, table, wanted, TABLE_STRIDE, MARKS, WARPS, CTAS)
