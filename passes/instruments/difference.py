"""The difference of two dumps, in time that grows with their lines: most lines of a dump stand there once."""

import difflib
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise

CONTEXT = 3
LARGEST_GAP = 200_000
"""Pairs of lines between two anchors that are compared line by line; what is larger counts as replaced."""


def unified_diff(before: Sequence[str], after: Sequence[str], name_before: str, name_after: str) -> str:
    """The unified difference of two texts by lines, three lines of context; empty when they are equal."""
    text: list[str] = []
    for group in AnchoredMatcher(before, after).get_grouped_opcodes(CONTEXT):
        first, last = group[0], group[-1]
        text.append(f"@@ -{_range(first[1], last[2])} +{_range(first[3], last[4])} @@")
        for kind, begin, end, begin_after, end_after in group:
            if kind == "equal":
                text += [" " + line for line in before[begin:end]]
                continue
            text += ["-" + line for line in before[begin:end]]
            text += ["+" + line for line in after[begin_after:end_after]]
    heading = [f"--- {name_before}", f"+++ {name_after}"] if text else []
    return "".join(line + "\n" for line in [*heading, *text])


class AnchoredMatcher(difflib.SequenceMatcher[str]):
    """Lines that stand once in either text are its anchors, in the longest order that both have; gaps as by difflib."""

    def __init__(self, before: Sequence[str], after: Sequence[str]) -> None:
        super().__init__(None, "", "")
        self.a, self.b = before, after

    def get_matching_blocks(self) -> list[difflib.Match]:
        """Runs of equal lines, in order, and an empty one at the end."""
        ends = [(-1, -1), *anchors(self.a, self.b), (len(self.a), len(self.b))]
        pairs: list[tuple[int, int]] = []
        for (begin, begin_after), (end, end_after) in pairwise(ends):
            pairs += _between(self.a, self.b, (begin + 1, end), (begin_after + 1, end_after))
            pairs.append((end, end_after))
        blocks: list[difflib.Match] = []
        for one, other in pairs[:-1]:
            if blocks and blocks[-1].a + blocks[-1].size == one and blocks[-1].b + blocks[-1].size == other:
                blocks[-1] = difflib.Match(blocks[-1].a, blocks[-1].b, blocks[-1].size + 1)
            else:
                blocks.append(difflib.Match(one, other, 1))
        return [*blocks, difflib.Match(len(self.a), len(self.b), 0)]


def anchors(before: Sequence[str], after: Sequence[str]) -> list[tuple[int, int]]:
    """Places of lines that stand once in both texts: as many as keep their order."""
    often, often_after = Counter(before), Counter(after)
    place = {line: number for number, line in enumerate(after) if often_after[line] == 1}
    pairs = [(number, place[line]) for number, line in enumerate(before) if often[line] == 1 and line in place]
    last: list[int] = []  # the smallest place at which an order of that length ends
    ends: list[int] = []
    earlier: list[int] = []
    for number, (_, there) in enumerate(pairs):
        length = bisect_left(last, there)
        earlier.append(ends[length - 1] if length else -1)
        last[length : length + 1], ends[length : length + 1] = [there], [number]
    chain: list[tuple[int, int]] = []
    number = ends[-1] if ends else -1
    while number >= 0:
        chain.append(pairs[number])
        number = earlier[number]
    return chain[::-1]


def _between(
    before: Sequence[str], after: Sequence[str], span: tuple[int, int], span_after: tuple[int, int]
) -> Iterator[tuple[int, int]]:
    """Places of equal lines in a gap between two anchors."""
    one, other = before[slice(*span)], after[slice(*span_after)]
    if 0 < len(one) * len(other) <= LARGEST_GAP:
        for block in difflib.SequenceMatcher(None, one, other, autojunk=False).get_matching_blocks():
            yield from ((span[0] + block.a + step, span_after[0] + block.b + step) for step in range(block.size))


def _range(begin: int, end: int) -> str:
    """Lines as a hunk's heading has them: the first one, counted from 1, and how many unless one."""
    length = end - begin
    return str(begin + 1) if length == 1 else f"{begin + (length > 0)},{length}"
