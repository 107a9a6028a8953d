# pyright: basic, reportAssignmentType=false, reportGeneralTypeIssues=false
# Kernel text: inside @triton.jit, names are tensors of a language that type checkers do not know.
"""Exact top k of a row of score codes that several programs share, each with its slice; listed in ascending index.

A histogram of 4096 bins narrows the row to the codes of one bin, in parallel; as long as too many keys share the bin,
another histogram splits it. The few candidates left (or the ties of a single code) are settled by every program for
itself, so that it knows where its own winners go without another meeting.
"""

import triton
import triton.language as tl


@triton.jit
def first_step(anchor):
    """The step, an exponent and 7 mantissa bits, at which the window of the histogram opens: 12 binades below."""
    exponent = tl.load(anchor)
    exponent = tl.where(exponent == 0, 127, exponent)
    return (tl.maximum(exponent, 13) - 12) << 7


@triton.jit
def code_bin(code, first):
    """4096 bins in the order of the codes: 128 for each of 16 binades, both signs; what lies outside joins the ends."""
    positive = code >= 0x80000000
    magnitude = tl.where(positive, code ^ 0x80000000, code ^ 0x7FFFFFFF).to(tl.int32, bitcast=True)
    step = tl.minimum(tl.maximum((magnitude >> 16) - first, 0), 2047)
    return tl.where(positive, 2048 + step, 2047 - step)


@triton.jit
def bin_range(bin, first):
    """The codes of a bin, int64: the first, and the one after the last."""
    positive = bin >= 2048
    step = tl.where(positive, bin - 2048, 2047 - bin)
    low = tl.where(step == 0, 0, (first + step).to(tl.int64) << 16)
    high = tl.where(step == 2047, 0x80000000, (first + step + 1).to(tl.int64) << 16)
    begin = tl.where(positive, 0x80000000 + low, 0x80000000 - high)
    end = tl.where(positive, 0x80000000 + high, 0x80000000 - low)
    return tl.maximum(begin, 1), end


@triton.jit
def bin_place(bin):
    """Neighbouring bins, which are hot together, lie in different sectors of the L2 cache."""
    return (bin & 63) * 64 + (bin >> 6)


@triton.jit
def additions(bin, position):
    """How much each lane adds for its key: 1, or where a warp's keys share a bin, all of them by its first lane.

    Rows of ties would otherwise queue at one address. Lanes may hold the same position: such a key counts once.
    """
    return tl.inline_asm_elementwise(
        """
        {
        .reg .pred same, first;
        .reg .b32 lanes, lane, lowest, keys, leader;
        mov.u32 $0, 1;
        match.all.sync.b32 lanes|same, $1, 0xffffffff;
        @!same bra done;
        match.any.sync.b32 lanes, $2, 0xffffffff;
        mov.u32 lane, %laneid;
        brev.b32 lowest, lanes;
        clz.b32 lowest, lowest;
        setp.eq.u32 first, lowest, lane;
        vote.sync.ballot.b32 keys, first, 0xffffffff;
        popc.b32 keys, keys;
        shfl.sync.idx.b32 leader, $2, 0, 31, 0xffffffff;
        setp.eq.u32 first, leader, $2;
        selp.b32 $0, keys, 0, first;
        done:
        }
        """,
        "=&r,r,r",
        [bin, position],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def count_bins(histogram, bin, position, counted, INTERPRET: tl.constexpr):
    """Add one to the bin of each counted key; positions tell keys apart."""
    if INTERPRET:
        tl.atomic_add(histogram + bin_place(bin), 1, mask=counted, sem="relaxed")
    else:
        number = additions(tl.where(counted, bin, -1), position)
        tl.atomic_add(histogram + bin_place(bin), number, mask=counted & (number > 0), sem="relaxed")


@triton.jit
def last_at_least(counts, above, wanted):
    """Where the sum of ``counts`` from the end, plus ``above``, first reaches ``wanted``: 1 or 0 (found), the place,
    what was summed before it, its own count. One reduction gives all, since one place alone adds to it."""
    PLACES: tl.constexpr = counts.shape[0]
    at_least = tl.cumsum(counts, 0, reverse=True) + above
    here = (at_least >= wanted) & (at_least - counts < wanted)
    fields = (tl.arange(0, PLACES) + 256).to(tl.int64) << 48
    fields += ((at_least - counts).to(tl.int64) << 24) + counts.to(tl.int64)
    packed = tl.sum(tl.where(here, fields, 0), 0)
    place = (packed >> 48).to(tl.int32)
    return place >> 8, place & 255, (packed >> 24).to(tl.int32) & 0xFFFFFF, packed.to(tl.int32) & 0xFFFFFF


@triton.jit
def bin_of_rank(histogram, wanted):
    """The bin of the ``wanted``-th largest code, how many codes stand in the bins above, and how many in it.

    The bin is -1 where the histogram holds fewer than ``wanted``; the other two mean nothing then. Counts are below
    2 ** 24.
    """
    coarse = tl.arange(0, 64)
    fine = tl.arange(0, 64)
    # Read past the L1 cache: other programs wrote this.
    counts = tl.load(histogram + fine[None, :] * 64 + coarse[:, None], cache_modifier=".cg")
    found, block, above, _ = last_at_least(tl.sum(counts, 1), 0, wanted)
    inner = tl.load(histogram + fine * 64 + block, cache_modifier=".cg")
    _, place, above, count = last_at_least(inner, above, wanted)
    return tl.where(found > 0, block * 64 + place, -1), above, count


@triton.jit
def count_codes(codes, position, high, histogram, first, gate, INTERPRET: tl.constexpr):
    """Add the visible codes at some positions below ``high`` to the histogram, those from bin ``gate`` on."""
    code = tl.load(codes + position, mask=position < high, other=0).to(tl.uint32, bitcast=True)
    bin = code_bin(code, first)
    count_bins(histogram, bin, position, (code != 0) & (bin >= gate), INTERPRET)


@triton.jit
def refine_shift(begin, end):
    """How far the codes of a range are to be shifted so that they fall into 4096 bins."""
    shift = tl.full([], 0, tl.int32)
    while ((end - begin - 1) >> shift) > 4095:
        shift += 1
    return shift


@triton.jit
def count_slice(codes, low, high, histogram, begin, end, TILE: tl.constexpr, INTERPRET: tl.constexpr):
    """Add this program's codes between ``begin`` and ``end`` to a finer histogram."""
    shift = refine_shift(begin, end)
    for start in range(low, high, TILE):
        position = start + tl.arange(0, TILE)
        code = tl.load(codes + position, mask=position < high, other=0).to(tl.uint32, bitcast=True).to(tl.int64)
        inside = (code >= begin) & (code < end) & (position < high)
        bin = tl.where(inside, (code - begin) >> shift, 0).to(tl.int32)
        count_bins(histogram, bin, position, inside, INTERPRET)


@triton.jit
def narrow_range(histogram, begin, end, wanted):
    """The range of the ``wanted``-th largest code by a finer histogram; how many are wanted in it, how many it has."""
    shift = refine_shift(begin, end)
    bin, above, count = bin_of_rank(histogram, wanted)
    begin += bin.to(tl.int64) << shift
    return begin, tl.minimum(begin + (1 << shift.to(tl.int64)), end), wanted - above, count


@triton.jit
def collect_slice(
    codes, low, high, begin, end, count, candidates, candidate_count, above_counts, tie_counts,
    MOST: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Count this program's codes above the range and in it; if the row has no more than MOST in it, they become
    candidates, by their distance from ``begin`` (the first half of ``candidates``) and their position."""
    above = tl.zeros([TILE], tl.int32)
    ties = tl.zeros([TILE], tl.int32)
    for start in range(low, high, TILE):
        position = start + tl.arange(0, TILE)
        code = tl.load(codes + position, mask=position < high, other=0).to(tl.uint32, bitcast=True).to(tl.int64)
        inside = (code >= begin) & (code < end)
        above += (code >= end).to(tl.int32)
        ties += inside.to(tl.int32)
        if count <= MOST:
            place = tl.atomic_add(candidate_count + tl.zeros([TILE], tl.int32), 1, mask=inside, sem="relaxed")
            tl.store(candidates + place, (code - begin).to(tl.int32), mask=inside)
            tl.store(candidates + MOST + place, position, mask=inside)
    tl.store(above_counts, tl.sum(above, 0))
    if count > MOST:
        tl.store(tie_counts, tl.sum(ties, 0))


@triton.jit
def settle(
    candidates, count, begin, wanted, above_counts, tie_counts, low, split,
    MOST: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """The last winner's code, how many keys of just that code win, and how many keys of the slices before this one lie
    above it and at it."""
    own = tl.arange(0, MOST)
    EACH: tl.constexpr = (SPLITS + MOST - 1) // MOST
    part = own[:, None] * EACH + tl.arange(0, EACH)[None, :]
    before = tl.sum(tl.load(above_counts + part, mask=part < split, other=0, cache_modifier=".cg"), 1)
    if count <= MOST:
        offset = tl.load(candidates + own, mask=own < count, other=-1, cache_modifier=".cg")
        position = tl.load(candidates + MOST + own, mask=own < count, other=0, cache_modifier=".cg")
        # Rivals down the rows: their number adds up inside the threads, and crosses them once.
        larger = tl.zeros([32, MOST], tl.int32)
        for start in range(0, count, 32):
            other = start + tl.arange(0, 32)
            # Every warp of every program reads these few lines: let the L1 cache answer.
            rival = tl.load(candidates + other, mask=other < count, other=-1)
            larger += (rival[:, None] > offset[None, :]).to(tl.int32)
        larger = tl.sum(larger, 0)
        # Of the codes with fewer than ``wanted`` larger ones the smallest is the last winner's.
        last = tl.min(tl.where((offset >= 0) & (larger < wanted), offset, 0x7FFFFFFF), 0)
        threshold = tl.where(count > 0, begin + last, 0)
        earlier = position < low
        fields = (before + (earlier & (offset > last)).to(tl.int32)).to(tl.int64) << 32
        fields += (earlier & (offset >= 0) & (offset == last)).to(tl.int64) << 16
        fields += (offset > last).to(tl.int64)
        sums = tl.sum(fields, 0)
        ties = tl.where(count > 0, wanted - (sums & 0xFFFF).to(tl.int32), 0)
        ties_before = (sums >> 16).to(tl.int32) & 0xFFFF
        above_before = (sums >> 32).to(tl.int32)
    else:
        threshold = begin
        ties = wanted
        above_before = tl.sum(before, 0)
        tied = tl.load(tie_counts + part, mask=part < split, other=0, cache_modifier=".cg")
        ties_before = tl.sum(tl.sum(tied, 1), 0)
    return threshold, ties, above_before, ties_before


@triton.jit
def list_slice(
    codes, low, high, threshold, ties, above_before, ties_before, out, TILE: tl.constexpr, ONE: tl.constexpr
):
    """Write this program's winners, in ascending index, where those of the slices before end. ONE tile may do."""
    for start in range(low, high, TILE):
        position = start + tl.reshape(tl.arange(0, TILE), (TILE // 32, 32))
        code = tl.load(codes + position, mask=position < high, other=0).to(tl.uint32, bitcast=True).to(tl.int64)
        above = (code > threshold).to(tl.int32)
        equal = ((code == threshold) & (code != 0)).to(tl.int32)
        marks = (above << 16) | equal
        in_row = tl.sum(marks, 1)
        rows_before = tl.cumsum(in_row, 0) - in_row
        running = tl.cumsum(marks, 1) + rows_before[:, None]
        above_rank = above_before + (running >> 16)
        tie_rank = ties_before + (running & 0xFFFF)
        wins = (above != 0) | ((equal != 0) & (tie_rank <= ties))
        tl.store(out + above_rank + tl.minimum(tie_rank, ties) - 1, position, mask=wins)
        if not ONE:
            total = tl.sum(in_row, 0)
            above_before += total >> 16
            ties_before += total & 0xFFFF
