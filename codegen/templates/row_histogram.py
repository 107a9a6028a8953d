# pyright: basic, reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false
# Kernel text: inside @gluon.jit, names are tensors and constants of a language whose types say little to a checker.
"""Where the k-th of a row's codes stands in 4096 counters, which each program of the row has in its shared memory."""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kimigraph.codegen.templates.cluster import everywhere, meet_cluster
from kimigraph.codegen.templates.shared_counts import (
    count_of,
    get_counts,
    get_two_counts,
    note_of,
    set_counts,
    set_note,
)


@gluon.jit
def add(a, b):
    """For scans."""
    return a + b


@gluon.jit
def counter_places(WARPS: gl.constexpr, CTAS: gl.constexpr):
    """All counters [64, 64], eight in a row a thread."""
    LAYOUT: gl.constexpr = everywhere([1, 8], [4, 8], [WARPS, 1], CTAS)
    group = gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT))
    return gl.expand_dims(group * 64, 1) + gl.expand_dims(gl.arange(0, 64, layout=gl.SliceLayout(0, LAYOUT)), 0)


@gluon.jit
def clear_counts(WARPS: gl.constexpr, CTAS: gl.constexpr):
    """All counters to 0."""
    places = counter_places(WARPS, CTAS)
    set_counts(places, gl.zeros_like(places))


@gluon.jit
def first_at_least(counts, place, before, wanted):
    """Where ``before`` plus the sum of ``counts`` [1, 64] first reaches ``wanted``: the place, or -1, what was summed
    before it, its own count. Every warp holds all counts and finds the same. ``wanted`` is below 2 ** 16."""
    at_least = gl.associative_scan(counts, 1, add) + before
    summed = at_least - counts
    here = (at_least >= wanted) & (summed < wanted)
    packed = gl.sum(gl.sum(gl.where(here, ((place + 1) << 16) + summed, 0), 1), 0)
    return (packed >> 16) - 1, packed & 0xFFFF, gl.sum(gl.sum(gl.where(here, counts, 0), 1), 0)


@gluon.jit
def place_of_rank(wanted, WARPS: gl.constexpr, CTAS: gl.constexpr):
    """The place of the ``wanted``-th largest code that the row's programs counted, how many codes are larger than all
    there, and how many are there. The place is -1 where they counted fewer.

    Groups of 64 counters are summed first. Counters of other programs must stay until the programs meet again.
    """
    PAIRS: gl.constexpr = everywhere([1, 2], [1, 32], [WARPS, 1], CTAS)
    EVERY: gl.constexpr = gl.SliceLayout(0, PAIRS)
    program = gl.expand_dims(gl.arange(0, CTAS, layout=gl.SliceLayout(1, PAIRS)), 1)
    column = gl.expand_dims(gl.arange(0, 64, layout=EVERY), 0)
    tl.debug_barrier()
    places = counter_places(WARPS, CTAS)
    totals = gl.sum(get_counts(places), 1)
    if CTAS > 1:
        set_note(gl.max(places, 1) >> 6, totals)
        meet_cluster()
        totals = gl.sum(note_of(column, program), 0)
    else:
        totals = gl.convert_layout(totals, EVERY)
    group, above, _ = first_at_least(gl.expand_dims(totals, 0), column, 0, wanted)
    first = gl.maximum(group, 0) * 64
    if CTAS > 1:
        inner = gl.expand_dims(gl.sum(count_of(first + column, program), 0), 0)
    else:
        inner = get_two_counts(first + column)
    place, above, here = first_at_least(inner, column, above, wanted)
    return gl.where(group >= 0, group * 64 + place, -1), above, here
