# pyright: basic, reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false
# Kernel text: inside @triton.jit, names are tensors of a language that type checkers do not know.
"""The first k keys of a sequence that ranks share out, in one launch: a program a row meets its peers three times.

They tell one another limits of their scores, then how many candidates fall into each of 256 bins between these. Then
all know the bin that the k-th of all falls into, and that those above it win. Only the candidates in that bin, the
contested ones, are told, and each rank finds the last winner among them.

A candidate is one word of 64 bits, its key: the score's bits as an integer of the same order above, the token's
distance to the last below, so that of two keys the higher one is before the other. No two keys are equal.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from kimigraph.codegen.templates.peer_words import (
    heard,
    meeting_place,
    on_gpus_alone,
    room_of,
    tell,
)

CONSTANTS: dict[str, Any] = {}


@triton.jit
def signed_order(bits):
    """Bits of fp32 as integers of the same order, and back."""
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def lane_of(words, lane, number: tl.constexpr):
    """One number of a few."""
    return tl.sum(tl.where(lane == number, words, 0), 0)


@triton.jit
def both_largest(first, second, other_first, other_second):
    """Of a reduction: the largest of each of two."""
    return tl.maximum(first, other_first), tl.maximum(second, other_second)


@triton.jit
def number_and_largest(number, value, other_number, other_value):
    """Of a reduction: the sum of the first, the largest of the second."""
    return number + other_number, tl.maximum(value, other_value)


@triton.jit
def limits_of_all(
    peers, room, told, code, valid, full, at, phase, own,
    NONE: tl.constexpr, WORDS: tl.constexpr, WAYS: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """Codes that bound all ranks' scores: what the k-th of all reaches at least, and the largest. ``full``: whether
    the rank has k candidates, the last of which all others must reach."""
    FEWER: tl.constexpr = -2147483647
    up, down = tl.where(valid, code, FEWER), tl.where(valid, -code, FEWER)
    largest, least = tl.reduce((up, down), 0, both_largest)
    kth = tl.where(full, -least, FEWER)
    lane, line = tl.arange(0, 4), tl.arange(0, BLOCK_W)[:, None]
    words = tl.where(lane == 0, kth, tl.where(lane == 1, largest, least))
    tell(peers, told, words, at + lane, lane < 4, phase, own, WORDS, WAYS)
    across = lane[None, :]
    every = heard(room, told, line, at + across, across < 4, phase, own, NONE, WORDS, WAYS)
    found = tl.max(tl.where(line < WAYS, every, FEWER), 0)
    kth, least = lane_of(found, lane, 0), lane_of(found, lane, 2)
    return tl.where(kth == FEWER, -least, kth), lane_of(found, lane, 1)


@triton.jit
def bin_of(score, low, largest, BINS: tl.constexpr):
    """The bin of a score, the same on every rank: higher scores in no lower bin."""
    begin = tl.maximum(signed_order(low).to(tl.float32, bitcast=True), -3.0e38)
    end = tl.minimum(signed_order(largest).to(tl.float32, bitcast=True), 3.0e38)
    width = end - begin
    scale = tl.where((width > 0) & (width < 3.0e38), BINS / width, 0.0)
    place = (tl.minimum(tl.maximum(score, -3.0e38), 3.0e38) - begin) * scale
    return tl.minimum(tl.where(place > 0.0, place, 0.0), BINS - 1.0).to(tl.int32)  # no number counts as 0


@triton.jit
def last_bin_of_all(
    peers, room, told, bins, enters, at, phase, own,
    K: tl.constexpr, BINS: tl.constexpr, NONE: tl.constexpr, WORDS: tl.constexpr, WAYS: tl.constexpr,
    BLOCK_W: tl.constexpr,
):  # fmt: skip
    """The highest bin with k candidates of all ranks in it and above, -1 where there are fewer in all; how many are
    above it; and how many each rank has in it [BLOCK_W]."""
    column, line = tl.arange(0, BINS), tl.arange(0, BLOCK_W)[:, None]
    counts = tl.histogram(bins, BINS, mask=enters)
    tell(peers, told, counts, at + column, column < BINS, phase, own, WORDS, WAYS)
    across = column[None, :]
    every = heard(room, told, line, at + across, across < BINS, phase, own, NONE, WORDS, WAYS)
    above = tl.cumsum(tl.sum(every, 0), 0, reverse=True)
    enough = above >= K
    number, higher = tl.reduce((enough.to(tl.int32), tl.where(enough, 0, above)), 0, number_and_largest)
    return number - 1, higher, tl.sum(tl.where(across == number - 1, every, 0), 1)


@triton.jit
def keys_of_all(
    room, told, held, at, phase, own,
    NONE: tl.constexpr, WORDS: tl.constexpr, WAYS: tl.constexpr, BLOCK_W: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The contested keys of all ranks in a row, below all keys where there is none."""
    FEWEST: tl.constexpr = -(1 << 63)
    line, column = tl.arange(0, BLOCK_W)[:, None], tl.arange(0, WIDTH)[None, :]
    live = column < held[:, None]
    keys = heard(room, told, line, at + column, live, phase, own, NONE, WORDS, WAYS, tl.int64)
    return tl.reshape(tl.where(live, keys, FEWEST), [BLOCK_W * WIDTH])


@triton.jit
def last_of_few(keys, wanted):
    """The ``wanted``-th of some keys, each of which counts those before it."""
    before = tl.sum((keys[:, None] > keys[None, :]).to(tl.int32), 0)
    return tl.sum(tl.where(before == wanted - 1, keys, 0), 0)


@triton.jit
def last_of_many(keys, wanted):
    """A number that ``wanted`` of the keys reach."""
    FEWEST: tl.constexpr = -(1 << 63)
    low, high = tl.min(tl.where(keys == FEWEST, (1 << 63) - 1, keys), 0), tl.max(keys, 0)
    while low < high:
        middle = (low | high) - ((low ^ high) >> 1)  # their mean, rounded up, in 64 bits
        reached = tl.sum((keys >= middle).to(tl.int32), 0)
        low = tl.where(reached >= wanted, middle, low)
        high = tl.where(reached == wanted, middle, tl.where(reached > wanted, high, middle - 1))
    return low


@triton.jit
def exchange_rows(
    scores, places, out, told, peers, rounds,
    N: tl.constexpr, K: tl.constexpr, RUN: tl.constexpr, ROWS: tl.constexpr, FAR: tl.constexpr,
    WORDS: tl.constexpr, WAYS: tl.constexpr, NONE: tl.constexpr, BINS: tl.constexpr, FEW: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """One of up to ROWS rows. A message has FAR words: limits, BINS counts, and up to N keys of two words each.
    Where a limit is infinite all candidates are in one bin. ``told``: FAR words for the message of each row."""
    row = tl.program_id(0)
    phase = tl.load(rounds + row)
    own = tl.load(peers + WAYS).to(tl.int32)
    room = room_of(peers, own)
    index, column = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    score = tl.load(scores + row * N + index, mask=index < N, other=0.0)
    place = tl.load(places + row * N + index, mask=index < N, other=-1)
    full = False
    if N == K:
        full = tl.load(places + row * N + (N - 1)) >= 0  # places stand in front
    out += row * K
    tl.store(out + column, column * 0 - 1, mask=column < K)  # the winners stand before these, later
    valid = place >= 0
    score = tl.where(score != score, float("-inf"), score) + 0.0
    code = signed_order(score.to(tl.int32, bitcast=True))
    token = (place // RUN * WAYS + own) * RUN + place % RUN
    key = (code.to(tl.int64) << 32) | (2147483647 - token).to(tl.int64)
    at = row * FAR
    low, largest = limits_of_all(peers, room, told, code, valid, full, at, phase, own, NONE, WORDS, WAYS, BLOCK_W)
    enters = valid & (code >= low)
    bins = bin_of(score, low, largest, BINS)
    at += 4
    last, above, held = last_bin_of_all(
        peers, room, told, bins, enters, at, phase, own, K, BINS, NONE, WORDS, WAYS, BLOCK_W
    )
    at = (at + BINS) // 2  # keys are counted by two words
    contested = enters & (bins == last)
    wanted = K - above
    cut = tl.full((), -(1 << 63), tl.int64)
    if tl.sum(held, 0) > wanted:
        order = tl.cumsum(contested.to(tl.int32), 0) - 1
        tell(peers, told, key, at + order, contested, phase, own, WORDS, WAYS, False)
        if tl.max(held, 0) <= FEW:
            few = keys_of_all(room, told, held, at, phase, own, NONE, WORDS, WAYS, BLOCK_W, FEW)
            cut = last_of_few(few, wanted)
        else:
            many = keys_of_all(room, told, held, at, phase, own, NONE, WORDS, WAYS, BLOCK_W, BLOCK_N)
            cut = last_of_many(many, wanted)
    wins = enters & ((bins > last) | (contested & (key >= cut)))
    tl.debug_barrier()
    tl.store(out + tl.cumsum(wins.to(tl.int32), 0) - 1, place, mask=wins)
    tl.store(rounds + row, 1 - phase)


def launch(scores, places, *, memory=torch):
    """The operator's tensors -> the rank's own places among the winners, int32 [B, S, k]."""
    constants, group = CONSTANTS["exchange_rows"], CONSTANTS["group"]
    device, rows = scores.device, CONSTANTS["rows"]
    out = memory.empty(CONSTANTS["out"], dtype=torch.int32, device=device)
    told = memory.empty(CONSTANTS["told"], dtype=torch.int32, device=device)
    if device.type != "cuda":  # memory is planned: nothing runs
        return on_gpus_alone(out, memory)
    place = meeting_place(group, constants["WORDS"], constants["ROWS"], constants["NONE"], device)
    if place is None:
        raise RuntimeError(
            f"ranks of '{group}' cannot write into one another's memory: --sp on GPUs needs GPUs of one machine with "
            "peer access, all of them visible to each process (CUDA_VISIBLE_DEVICES)"
        )
    lines = [tensor.view(rows, -1) for tensor in (scores, places, out)]
    for first in range(0, rows, constants["ROWS"]):  # rows take turns in the room
        some = [line[first : first + constants["ROWS"]] for line in lines]
        exchange_rows[(len(some[0]),)](*some, told, place[0], place[1], **constants, **CONSTANTS["options"])
    return out
