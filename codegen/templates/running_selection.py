# pyright: basic, reportAssignmentType=false, reportGeneralTypeIssues=false
# Kernel text: inside @triton.jit, names are tensors of a language that type checkers do not know.
"""Exact top k of codes that arrive in the order of their positions, for ROWS rows at once, with a buffer a row.

What exceeds its row's threshold is appended; when a buffer fills up, rows keep their k largest codes, whose last is the
new threshold. A later code that only equals it can not win: k codes before it are no smaller, and of equals the first
wins. So a buffer always holds the winners of what has passed, in ascending position, and can not overflow.
"""

import triton
import triton.language as tl

from kimigraph.codegen.templates.cache_rows import listed_id


@triton.jit
def append_codes(
    code, found, places, start, threshold, count, ROWS: tl.constexpr, GROUP: tl.constexpr, CAPACITY: tl.constexpr
):
    """Append the codes [ROWS, GROUP] of positions from ``start`` on that exceed their row's threshold.

    Returns the new counts. ``threshold`` and ``count`` are [ROWS]; a hidden key's code is 0.
    """
    row = tl.arange(0, ROWS)[:, None]
    lane = tl.arange(0, GROUP)[None, :]
    taken = code > threshold[:, None]
    rank = tl.cumsum(taken.to(tl.int32), 1)
    place = row * CAPACITY + count[:, None] + rank - 1
    tl.store(found + place, code.to(tl.int32, bitcast=True), mask=taken)
    tl.store(places + place, start + lane + row * 0, mask=taken)
    return count + tl.sum(taken.to(tl.int32), 1)


@triton.jit
def buffered_codes(found, start, count, ROWS: tl.constexpr, CAPACITY: tl.constexpr, CHUNK: tl.constexpr):
    """[ROWS, CHUNK] codes from place ``start`` of the buffers on, 0 past their ends."""
    place = start + tl.arange(0, CHUNK)[None, :]
    row = tl.arange(0, ROWS)[:, None]
    code = tl.load(found + row * CAPACITY + place, mask=place < count[:, None], other=0)
    return code.to(tl.uint32, bitcast=True)


@triton.jit
def count_at_least(found, count, code, ROWS: tl.constexpr, CAPACITY: tl.constexpr, CHUNK: tl.constexpr):
    """How many codes of each buffer are no smaller than its row's ``code``, which is not 0."""
    total = tl.zeros([ROWS, CHUNK], tl.int32)
    for start in range(0, tl.max(count, 0), CHUNK):
        total += (buffered_codes(found, start, count, ROWS, CAPACITY, CHUNK) >= code[:, None]).to(tl.int32)
    return tl.sum(total, 1)


@triton.jit
def extremes(found, count, least, ROWS: tl.constexpr, CAPACITY: tl.constexpr, CHUNK: tl.constexpr):
    """The smallest code of each buffer that is no smaller than ``least``, and its largest, int64."""
    low = tl.full([ROWS, CHUNK], 0xFFFFFFFF, tl.uint32)
    high = tl.zeros([ROWS, CHUNK], tl.uint32)
    for start in range(0, tl.max(count, 0), CHUNK):
        code = buffered_codes(found, start, count, ROWS, CAPACITY, CHUNK)
        low = tl.minimum(low, tl.where(code >= least[:, None], code, 0xFFFFFFFF))
        high = tl.maximum(high, code)
    return tl.min(low, 1).to(tl.int64), tl.max(high, 1).to(tl.int64)


@triton.jit
def last_winners(found, count, K: tl.constexpr, ROWS: tl.constexpr, CAPACITY: tl.constexpr, CHUNK: tl.constexpr):
    """The K-th largest code of each buffer, and how many keys of just that code win; 0 and 0 where K or fewer are."""
    low, high = extremes(found, count, tl.full([ROWS], 1, tl.uint32), ROWS, CAPACITY, CHUNK)
    high = tl.where(count > K, high + 1, low)
    while tl.max(high - low, 0) > 1:
        middle = low + tl.maximum((high - low) // 2, 0)
        number = count_at_least(found, count, middle.to(tl.uint32), ROWS, CAPACITY, CHUNK)
        searching = high - low > 1
        low = tl.where(searching & (number >= K), middle, low)
        high = tl.where(searching & (number < K), middle, high)
        # Just K codes from here on: the smallest of them is the last winner.
        high = tl.where(searching & (number == K), low, high)
    threshold, _ = extremes(found, count, low.to(tl.uint32), ROWS, CAPACITY, CHUNK)
    above = count_at_least(found, count, (threshold + 1).to(tl.uint32), ROWS, CAPACITY, CHUNK)
    above = tl.where(threshold == 0xFFFFFFFF, 0, above)
    full = count > K
    return tl.where(full, threshold, 0).to(tl.uint32), tl.where(full, K - above, 0)


@triton.jit
def winners(code, threshold, ties, above_before, equal_before):
    """Which codes [ROWS, .] of buffers win, and the places of those in the lists: above the threshold or first at it.

    ``above_before`` and ``equal_before`` count what lies before the chunk; their new values come last.
    """
    above = (code > threshold[:, None]).to(tl.int32)
    equal = ((code == threshold[:, None]) & (code != 0)).to(tl.int32)
    # Both running counts in one scan: a chunk is below 2 ** 15.
    marks = (above << 16) | equal
    running = tl.cumsum(marks, 1)
    above_rank = above_before[:, None] + (running >> 16)
    equal_rank = equal_before[:, None] + (running & 0xFFFF)
    wins = (above != 0) | ((equal != 0) & (equal_rank <= ties[:, None]))
    slot = above_rank + tl.minimum(equal_rank, ties[:, None]) - 1
    total = tl.sum(marks, 1)
    return wins, slot, above_before + (total >> 16), equal_before + (total & 0xFFFF)


@triton.jit
def keep_winners(
    found, places, count, threshold, ties, ROWS: tl.constexpr, CAPACITY: tl.constexpr, CHUNK: tl.constexpr
):
    """Move codes above the threshold and the first ``ties`` at it to the front of their buffer, in order."""
    row = tl.arange(0, ROWS)[:, None]
    above_before = tl.zeros([ROWS], tl.int32)
    equal_before = tl.zeros([ROWS], tl.int32)
    for start in range(0, tl.max(count, 0), CHUNK):
        code = buffered_codes(found, start, count, ROWS, CAPACITY, CHUNK)
        own = start + tl.arange(0, CHUNK)[None, :]
        position = tl.load(places + row * CAPACITY + own, mask=own < count[:, None], other=0)
        wins, slot, above_before, equal_before = winners(code, threshold, ties, above_before, equal_before)
        # Slots lie no further than what was read: once all have read, they may be written.
        tl.debug_barrier()
        tl.store(found + row * CAPACITY + slot, code.to(tl.int32, bitcast=True), mask=wins)
        tl.store(places + row * CAPACITY + slot, position, mask=wins)
    tl.debug_barrier()


@triton.jit
def list_winners(
    found, places, count, threshold, ties, out, last_row, block_table, sequence, K: tl.constexpr, ROWS: tl.constexpr,
    CAPACITY: tl.constexpr, TABLE_STRIDE: tl.constexpr, LIST_ROWS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """List the winners of rows before ``last_row`` in ``out`` [., K], in order, then -1."""
    row = tl.arange(0, ROWS)[:, None]
    there = row < last_row
    above_before = tl.zeros([ROWS], tl.int32)
    equal_before = tl.zeros([ROWS], tl.int32)
    for start in range(0, tl.max(count, 0), CHUNK):
        code = buffered_codes(found, start, count, ROWS, CAPACITY, CHUNK)
        own = start + tl.arange(0, CHUNK)[None, :]
        position = tl.load(places + row * CAPACITY + own, mask=own < count[:, None], other=0)
        wins, slot, above_before, equal_before = winners(code, threshold, ties, above_before, equal_before)
        wins = wins & there
        listed = listed_id(position, wins, block_table, sequence, TABLE_STRIDE, 64, LIST_ROWS)
        tl.store(out + row * K + slot, listed, mask=wins)
    number = above_before + tl.minimum(equal_before, ties)
    for start in range(tl.min(number, 0) // CHUNK * CHUNK, K, CHUNK):
        slot = start + tl.arange(0, CHUNK)[None, :]
        rest = (slot >= number[:, None]) & (slot < K) & there
        tl.store(out + row * K + slot, tl.full([ROWS, CHUNK], -1, tl.int32), mask=rest)
