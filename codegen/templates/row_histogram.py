# pyright: basic, reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false
# Kernel text: inside @gluon.jit, names are tensors and constants of a language whose types say little to a checker.
"""Where the k-th of a row's codes stands in 4096 counters: counted in shared memory, added up over a row's programs."""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kimigraph.codegen.templates.launch_order import arrive_and_wait
from kimigraph.codegen.templates.shared_counts import get_counts, get_two_counts, set_counts


@gluon.jit
def add(a, b):
    """For scans."""
    return a + b


@gluon.jit
def counter_places(WARPS: gl.constexpr):
    """All counters [64, 64], eight in a row a thread."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    group = gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT))
    return gl.expand_dims(group * 64, 1) + gl.expand_dims(gl.arange(0, 64, layout=gl.SliceLayout(0, LAYOUT)), 0)


@gluon.jit
def clear_counts(WARPS: gl.constexpr):
    """All counters to 0."""
    places = counter_places(WARPS)
    set_counts(places, gl.zeros_like(places))


@gluon.jit
def first_at_least(counts, place, before, wanted):
    """Where ``before`` plus the sum of 64 ``counts`` first reaches ``wanted``: the place, or -1, what was summed before
    it, its own count. Every warp holds all counts and finds the same. ``wanted`` is below 2 ** 16."""
    at_least = gl.associative_scan(counts, 0, add) + before
    summed = at_least - counts
    here = (at_least >= wanted) & (summed < wanted)
    packed = gl.sum(gl.where(here, ((place + 1) << 16) + summed, 0), 0)
    return (packed >> 16) - 1, packed & 0xFFFF, gl.sum(gl.where(here, counts, 0), 0)


@gluon.jit
def place_of_rank(counts, wanted, WARPS: gl.constexpr):
    """The place of the ``wanted``-th largest code, how many codes are larger than all there, and how many are there.

    ``counts`` [64, 64] is what the shared counters hold. The place is -1 where they hold fewer.
    """
    EVERY: gl.constexpr = gl.BlockedLayout([2], [32], [WARPS], [0])
    number = gl.arange(0, 64, layout=EVERY)
    totals = gl.convert_layout(gl.sum(counts, 1), EVERY)
    group, above, _ = first_at_least(totals, number, 0, wanted)
    inner = get_two_counts(gl.maximum(group, 0) * 64 + number)
    place, above, here = first_at_least(inner, number, above, wanted)
    return gl.where(group >= 0, group * 64 + place, -1), above, here


@gluon.jit
def row_counts(histogram, arrivals, target, CTAS: gl.constexpr, WARPS: gl.constexpr):
    """The counters of all programs of the row, in each one's shared memory and as a tensor."""
    places = counter_places(WARPS)
    tl.debug_barrier()
    counts = get_counts(places)
    if CTAS > 1:
        gl.atomic_add(histogram + places, counts, mask=counts > 0, sem="relaxed")
        arrive_and_wait(arrivals, target)
        counts = gl.load(histogram + places, cache_modifier=".cg")
        set_counts(places, counts)
        tl.debug_barrier()
    return counts
