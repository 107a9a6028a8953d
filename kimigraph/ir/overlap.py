"""The heaviest set found of things of which no two may overlap: what no placing of them can undercut."""

from collections.abc import Sequence

STARTS = 48
"""From so many things, those with the most beside them, a set is grown."""

MOST_BESIDE = 400
"""With more to choose from than this, the largest is taken instead of what leaves most to choose from."""


def heaviest_set(sizes: Sequence[int], conflicts: Sequence[Sequence[int]], known: Sequence[Sequence[int]] = ()) -> int:
    """Bytes of the heaviest set found; ``known`` are sets to begin with, beside single things."""
    beside = [set(found) for found in conflicts]
    crowd = [size + sum(sizes[other] for other in found) for size, found in zip(sizes, conflicts, strict=True)]
    starts = sorted(range(len(sizes)), key=lambda number: -crowd[number])[:STARTS]
    groups = [*known, *([number] for number in starts)]
    return max((_grown(list(group), sizes, beside) for group in groups if group), default=0)


def _grown(group: list[int], sizes: Sequence[int], beside: Sequence[set[int]]) -> int:
    """The bytes of ``group`` with whatever overlaps with none in it, at each step what leaves most to choose from."""
    common = set[int].intersection(*(beside[number] for number in group))
    total = sum(sizes[number] for number in group)
    while common:
        if len(common) > MOST_BESIDE:
            best = min(common, key=lambda number: (-sizes[number], number))
        else:
            best = max(common, key=lambda number: (_promise(number, common, sizes, beside), -number))
        total += sizes[best]
        common = common & beside[best]
    return total


def _promise(number: int, common: set[int], sizes: Sequence[int], beside: Sequence[set[int]]) -> int:
    return sizes[number] + sum(sizes[other] for other in common & beside[number])
