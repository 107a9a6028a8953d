"""Differences of dumps: right for any two texts, as short as difflib's where that is what people read."""

import difflib
import re

from hypothesis import given, settings
from hypothesis import strategies as st

from kimigraph.passes.instruments.difference import anchors, unified_diff

LINES = st.lists(st.sampled_from([*"abcdefgh", "", "same", "same"]), max_size=40)


def applied(before: list[str], difference: str) -> list[str]:
    """What the difference makes of ``before``; asserts that what it takes away or keeps stands there."""
    result: list[str] = []
    place = 0
    for line in difference.splitlines()[2:]:
        heading = re.fullmatch(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@", line)
        if heading:
            begin = int(heading[1]) - (heading[2] != "0")
            result += before[place:begin]
            place = begin
            assert len(result) == int(heading[3]) - (heading[4] != "0")
        elif line.startswith("+"):
            result.append(line[1:])
        else:
            assert before[place] == line[1:]
            place += 1
            result += [line[1:]] if line.startswith(" ") else []
    return result + before[place:]


@settings(max_examples=300, deadline=None)
@given(LINES, LINES)
def test_a_difference_leads_from_one_text_to_the_other(before: list[str], after: list[str]) -> None:
    difference = unified_diff(before, after, "before", "after")
    assert (difference == "") == (before == after)
    assert applied(before, difference) == after
    if difference:
        assert difference.startswith("--- before\n+++ after\n@@ ")


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 60), unique=True), st.lists(st.integers(0, 60), unique=True))
def test_anchors_are_the_longest_common_order(before: list[int], after: list[int]) -> None:
    one, other = [str(item) for item in before], [str(item) for item in after]
    found = anchors(one, other)
    assert found == sorted(found) and [place for _, place in found] == sorted(place for _, place in found)
    assert all(one[here] == other[there] for here, there in found)
    lengths = [0] * (len(other) + 1)  # the usual table of longest common subsequences, a row at a time
    for line in one:
        row = [0]
        for number, there in enumerate(other):
            row.append(lengths[number] + 1 if line == there else max(row[-1], lengths[number + 1]))
        lengths = row
    assert len(found) == lengths[-1]


def test_it_is_difflibs_for_lines_that_stand_once() -> None:
    before = [f"node_{number} = op(node_{number - 1})" for number in range(200)]
    after = [*before[:50], "new = fused(node_49)", *before[60:120], *before[121:]]
    expected = difflib.unified_diff(before, after, "a", "b", lineterm="")
    assert unified_diff(before, after, "a", "b") == "".join(line + "\n" for line in expected)
