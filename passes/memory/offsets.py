"""Places for things of known sizes, some of which may not overlap: first the large ones, each in the tightest gap."""

from bisect import insort
from collections.abc import Callable, Sequence

WORK = 4_000_000
"""Pairs of things that may be compared to come nearer to the bound: about a second."""

MOST_TRIES = 200
MayShare = Callable[[int, int], bool]
"""Whether two things, by number, may lie in the same bytes."""


def place_all(sizes: Sequence[int], may_share: MayShare, bound: int) -> list[int]:
    """The offset of each thing: the best of several orders of placing, the first that needs no more than ``bound``.

    After a few fixed orders, what stands highest goes to the front of the best one, as often as ``WORK`` allows.
    """
    best: list[int] = []
    peak = 0
    for order in _orders(sizes):
        offsets = _place(sizes, may_share, order)
        reached = _top(sizes, offsets)
        if not best or reached < peak:
            best, peak = offsets, reached
        if peak <= bound:
            return best
    order = _orders(sizes)[0]
    offsets = _place(sizes, may_share, order)
    for _ in range(min(MOST_TRIES, WORK // len(sizes) ** 2)):
        top = _top(sizes, offsets)
        highest = [number for number in order if offsets[number] + sizes[number] == top]
        order = highest + [number for number in order if number not in highest]
        offsets = _place(sizes, may_share, order)
        reached = _top(sizes, offsets)
        if reached < peak:
            best, peak = offsets, reached
        if peak <= bound:
            break
    return best


def _top(sizes: Sequence[int], offsets: Sequence[int]) -> int:
    return max((offset + size for offset, size in zip(offsets, sizes, strict=True)), default=0)


def _orders(sizes: Sequence[int]) -> list[list[int]]:
    numbers = list(range(len(sizes)))
    by_size = sorted(numbers, key=lambda number: (-sizes[number], number))
    # The things come in the order in which they are made: the second order is that of an allocator that sees one at a
    # time, the third the same from the end.
    return [by_size, numbers, numbers[::-1]]


def _place(sizes: Sequence[int], may_share: MayShare, order: Sequence[int]) -> list[int]:
    offsets = [0] * len(sizes)
    placed: list[tuple[int, int]] = []  # offset and number, by offset
    for number in order:
        offsets[number] = _gap(number, sizes, placed, may_share)
        insort(placed, (offsets[number], number))
    return offsets


def _gap(number: int, sizes: Sequence[int], placed: Sequence[tuple[int, int]], may_share: MayShare) -> int:
    """The offset of the smallest gap that holds a thing between those that it must not overlap, or behind them."""
    size, end = sizes[number], 0
    best: tuple[int, int] | None = None
    for offset, other in placed:
        if may_share(number, other):
            continue
        room = offset - end
        if room >= size and (best is None or room < best[0]):
            best = room, end
        end = max(end, offset + sizes[other])
    return end if best is None else best[1]
