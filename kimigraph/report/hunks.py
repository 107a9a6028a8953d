"""Unified differences made small enough to look at: noise dropped, unchanged lines few, length bounded."""

import difflib
import re
from collections.abc import Iterator
from dataclasses import dataclass

CONTEXT = 3
_DELETIONS = re.compile(r"; del [\w, ]+(?=  #|$)")
_HEADER = re.compile(r"@@ -(\d+)(?:,\d+)? \+(\d+)(?:,\d+)? @@")
_LARGEST_BLOCK = 400_000
"""Removed times added lines of a block up to which it is compared line by line again."""


@dataclass(frozen=True)
class Hunk:
    """Some lines of a difference, each with its sign in front; ``old`` and ``new`` number the first ones."""

    old: int
    new: int
    lines: tuple[str, ...]

    def text(self) -> str:
        """The hunk in the unified form."""
        removed = sum(line[0] != "+" for line in self.lines)
        added = sum(line[0] != "-" for line in self.lines)
        return "\n".join([f"@@ -{self.old},{removed} +{self.new},{added} @@", *self.lines])


@dataclass(frozen=True)
class Difference:
    """What a pass changed: hunks, how many lines went and came, and how many hunks were left out."""

    hunks: tuple[Hunk, ...]
    removed: int
    added: int
    omitted: int = 0

    def text(self) -> str:
        """The hunks in the unified form."""
        return "\n".join(hunk.text() for hunk in self.hunks)

    def within(self, characters: int) -> "Difference":
        """The first hunks that fit into so many characters."""
        kept: list[Hunk] = []
        for hunk in self.hunks:
            characters -= sum(len(line) + 1 for line in hunk.lines) + 30
            if characters < 0:
                break
            kept.append(hunk)
        return Difference(tuple(kept), self.removed, self.added, len(self.hunks) - len(kept))


def read_difference(text: str) -> Difference:
    """The difference that a ``.diff`` dump shows.

    Lines that differ only in which names they free (``del``) count as unchanged, ``torch.ops.`` is left out of calls.
    """
    hunks = tuple(small for hunk in _hunks(text) for small in _tightened(hunk))
    lines = [line[0] for hunk in hunks for line in hunk.lines]
    return Difference(hunks, lines.count("-"), lines.count("+"))


def _hunks(text: str) -> Iterator[Hunk]:
    start: tuple[int, int] | None = None
    lines: list[str] = []
    for line in text.split("\n"):
        header = _HEADER.match(line)
        if header is None:
            if start is not None and line[:1] in ("+", "-", " "):
                lines.append(line.replace("torch.ops.", ""))
            continue
        if start is not None:
            yield Hunk(*start, tuple(lines))
        start, lines = (int(header[1]), int(header[2])), []
    if start is not None:
        yield Hunk(*start, tuple(lines))


def _tightened(hunk: Hunk) -> Iterator[Hunk]:
    """The hunk without the changes that are none, cut where more unchanged lines follow each other than it needs."""
    lines = [line for block in _blocks(hunk.lines) for line in _without_noise(block)]
    changed = [position for position, line in enumerate(lines) if line[0] != " "]
    runs: list[list[int]] = []
    for position in changed:
        if runs and position - runs[-1][1] <= 2 * CONTEXT + 1:
            runs[-1][1] = position
        else:
            runs.append([position, position])
    for first, last in runs:
        start, stop = max(0, first - CONTEXT), last + CONTEXT + 1
        before = [line[0] for line in lines[:start]]
        old = hunk.old + len(before) - before.count("+")
        new = hunk.new + len(before) - before.count("-")
        yield Hunk(old, new, tuple(lines[start:stop]))


def _blocks(lines: tuple[str, ...]) -> Iterator[list[str]]:
    """Runs of removed lines with the added ones behind them, and runs of unchanged lines."""
    block: list[str] = []
    for line in lines:
        if block and ((line[0] == " ") != (block[-1][0] == " ") or (line[0] == "-" and block[-1][0] == "+")):
            yield block
            block = []
        block.append(line)
    if block:
        yield block


def _without_noise(block: list[str]) -> list[str]:
    removed = [line[1:] for line in block if line[0] == "-"]
    added = [line[1:] for line in block if line[0] == "+"]
    if not removed or not added or len(removed) * len(added) > _LARGEST_BLOCK:
        return block
    plain = [[_DELETIONS.sub("", line) for line in side] for side in (removed, added)]
    result: list[str] = []
    for tag, i1, i2, j1, j2 in difflib.SequenceMatcher(None, *plain, autojunk=False).get_opcodes():
        if tag == "equal":
            result += [" " + line for line in added[j1:j2]]
        else:
            result += ["-" + line for line in removed[i1:i2]] + ["+" + line for line in added[j1:j2]]
    return result
