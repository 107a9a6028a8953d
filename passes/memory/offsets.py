"""Places for things of known sizes, some of which may not overlap: first the large ones, each in the tightest gap."""

from collections.abc import Sequence

WORK = 2_000_000
"""Pairs of things that may be compared to come nearer to the bound: about a second."""

MOST_TRIES = 200


def place_all(sizes: Sequence[int], conflicts: Sequence[Sequence[int]], bound: int) -> list[int]:
    """The offset of each thing: the best of several orders of placing, the first that needs no more than ``bound``.

    ``conflicts`` has for each thing, by number, those that it may not overlap. After a few fixed orders, what stands
    highest goes to the front of the best one, as often as ``WORK`` allows.
    """
    best: list[int] = []
    order: list[int] = []
    peak = 0
    for candidate in _orders(sizes, conflicts):
        offsets = _place(sizes, conflicts, candidate)
        reached = _top(sizes, offsets)
        if not best or reached < peak:
            best, order, peak = offsets, candidate, reached
        if peak <= bound:
            return best
    each = sum(map(len, conflicts)) + len(sizes)
    offsets = best
    for _ in range(min(MOST_TRIES, WORK // max(each, 1))):
        top = _top(sizes, offsets)
        highest = {number for number in order if offsets[number] + sizes[number] == top}
        order = [*(n for n in order if n in highest), *(n for n in order if n not in highest)]
        offsets = _place(sizes, conflicts, order)
        reached = _top(sizes, offsets)
        if reached < peak:
            best, peak = offsets, reached
        if peak <= bound:
            break
    return best


def _top(sizes: Sequence[int], offsets: Sequence[int]) -> int:
    return max((offset + size for offset, size in zip(offsets, sizes, strict=True)), default=0)


def _orders(sizes: Sequence[int], conflicts: Sequence[Sequence[int]]) -> list[list[int]]:
    numbers = list(range(len(sizes)))
    by_size = sorted(numbers, key=lambda number: (-sizes[number], number))
    crowded = [sizes[number] + sum(sizes[other] for other in conflicts[number]) for number in numbers]
    by_crowd = sorted(numbers, key=lambda number: (-crowded[number], number))
    # The things come in the order in which they are made: the second order is that of an allocator that sees one at a
    # time, the third the same from the end; the last begins where most must lie side by side.
    return [by_size, numbers, numbers[::-1], by_crowd]


def _place(sizes: Sequence[int], conflicts: Sequence[Sequence[int]], order: Sequence[int]) -> list[int]:
    offsets = [-1] * len(sizes)
    for number in order:
        placed = sorted((offsets[other], other) for other in conflicts[number] if offsets[other] >= 0)
        offsets[number] = _gap(sizes[number], sizes, placed)
    return offsets


def _gap(size: int, sizes: Sequence[int], placed: Sequence[tuple[int, int]]) -> int:
    """The offset of the smallest gap that holds a thing between those that it must not overlap, or behind them."""
    end = 0
    best: tuple[int, int] | None = None
    for offset, other in placed:
        room = offset - end
        if room >= size and (best is None or room < best[0]):
            best = room, end
        end = max(end, offset + sizes[other])
    return end if best is None else best[1]
