# pyright: basic, reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false
# Kernel text: inside @triton.jit, names are tensors of a language that type checkers do not know.
"""The first k keys of a sequence that ranks share out, in one launch: a program a row meets its peers three times.

They tell one another limits of their scores, then how many candidates fall into each of 256 bins between these, then
the candidates in and above the bin that must hold the last winner. All find the same one, and merge the ranks' lists,
each of which ascends.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from kimigraph.codegen.templates.peer_words import leave_word, meeting_place, on_gpus_alone, room_of, word_from

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
def limits_of_all(
    peers, room, code, valid, at, phase, own,
    K: tl.constexpr, NONE: tl.constexpr, WORDS: tl.constexpr, WAYS: tl.constexpr,
):  # fmt: skip
    """Codes that bound all ranks' scores: what the k-th of all reaches at least, and the largest."""
    FEWER: tl.constexpr = -2147483647
    lane = tl.arange(0, 4)
    least = tl.min(tl.where(valid, code, 2147483647), 0)
    largest = tl.max(tl.where(valid, code, FEWER), 0)
    kth = tl.where(tl.sum(valid.to(tl.int32), 0) >= K, least, FEWER)
    words = tl.where(lane == 0, kth, tl.where(lane == 1, largest, least))
    leave_word(peers, words, at + lane, lane < 4, phase, own, WORDS, WAYS)
    found = words
    for rank in tl.static_range(WAYS):
        there = word_from(room, rank, at + lane, lane < 4, phase, own, NONE, WORDS, WAYS, False)
        there = tl.where(own == rank, words, there)
        found = tl.where(lane < 2, tl.maximum(found, there), tl.minimum(found, there))
    kth, least = lane_of(found, lane, 0), lane_of(found, lane, 2)
    return tl.where(kth == FEWER, least, kth), lane_of(found, lane, 1)


@triton.jit
def bin_of(score, low, largest, BINS: tl.constexpr):
    """The bin of a score, the same on every rank: higher scores in no lower bin."""
    begin = tl.maximum(signed_order(low).to(tl.float32, bitcast=True), -3.0e38)
    end = tl.minimum(signed_order(largest).to(tl.float32, bitcast=True), 3.0e38)
    width = end - begin
    scale = tl.where((width > 0) & (width < 3.0e38), BINS / width, 0.0)
    place = (tl.minimum(tl.maximum(score, -3.0e38), 3.0e38) - begin) * scale
    return tl.minimum(tl.maximum(place, 0.0), BINS - 1.0).to(tl.int32)


@triton.jit
def least_bin_of_all(
    peers, room, bins, enters, at, phase, own,
    K: tl.constexpr, BINS: tl.constexpr, NONE: tl.constexpr, WORDS: tl.constexpr, WAYS: tl.constexpr,
):  # fmt: skip
    """The highest bin with k candidates of all ranks in it and above, 0 where there are fewer in all; how many are
    above it."""
    column = tl.arange(0, BINS)
    counts = tl.histogram(bins, BINS, mask=enters)
    leave_word(peers, counts, at + column, column < BINS, phase, own, WORDS, WAYS)
    total = counts
    for rank in tl.static_range(WAYS):
        total += word_from(room, rank, at + column, column < BINS, phase, own, NONE, WORDS, WAYS, False)
    above = tl.cumsum(total, 0, reverse=True)
    least = tl.maximum(tl.sum((above >= K).to(tl.int32), 0) - 1, 0)
    return least, tl.sum(tl.where(column > least, total, 0), 0)


@triton.jit
def count_of(live):
    """How many there are of all ranks."""
    return tl.sum(live.to(tl.int32))


@triton.jit
def last_winner(code, token, live, wanted):
    """Code and token of the ``wanted``-th of those that are ``live``, higher codes and lower tokens first; a code below
    all where there are no more."""
    low = tl.min(tl.where(live, code, 2147483647))
    high = tl.max(tl.where(live, code, -2147483647))
    cut, cut_token = -2147483647 + tl.full((), 0, tl.int32), 2147483647 + tl.full((), 0, tl.int32)
    if count_of(live) > wanted:
        while low < high:  # the highest code that so many reach
            middle = (low | high) - ((low ^ high) >> 1)  # their mean, rounded up, in 32 bits
            enough = count_of(live & (code >= middle)) >= wanted
            low = tl.where(enough, middle, low)
            high = tl.where(enough, high, middle - 1)
        cut = low
        wanted -= count_of(live & (code > cut))
        equal = live & (code == cut)
        if count_of(equal) > wanted:
            first = tl.full((), 0, tl.int32)
            while first < cut_token:  # the lowest token up to which there are so many of that code
                middle = first + (cut_token - first) // 2
                enough = count_of(equal & (token <= middle)) >= wanted
                cut_token = tl.where(enough, middle, cut_token)
                first = tl.where(enough, first, middle + 1)
    return cut, cut_token


@triton.jit
def merge_lists(
    lists, token, wins, out,
    N: tl.constexpr, K: tl.constexpr, WAYS: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_K: tl.constexpr,
    STEPS: tl.constexpr,
):  # fmt: skip
    """Write the winners of all ranks [BLOCK_W, .], each rank's ascending, in ascending order, then -1."""
    lane = tl.arange(0, BLOCK_W)
    at = tl.cumsum(wins.to(tl.int32), 1) - 1
    counts = tl.sum(wins.to(tl.int32), 1)
    tl.store(lists + lane[:, None] * N + at, token, mask=wins)
    tl.debug_barrier()
    for turn in tl.static_range(1, WAYS):
        other = (lane + turn) % WAYS
        there = lists + other[:, None] * N
        same = other[:, None] == lane[None, :]
        begin = tl.zeros(token.shape, tl.int32)
        end = begin + tl.sum(tl.where(same, counts[None, :], 0), 1)[:, None]
        for _ in range(STEPS):  # how many of that rank stand before each
            middle = (begin + end) >> 1
            open_ = begin < end
            before = open_ & (tl.load(there + middle, mask=wins & open_, other=2147483647) < token)
            begin = tl.where(before, middle + 1, begin)
            end = tl.where(before, end, middle)
        at += begin
    tl.store(out + at, token, mask=wins)
    column = tl.arange(0, BLOCK_K)
    tl.store(out + column, column * 0 - 1, mask=(column >= tl.sum(counts, 0)) & (column < K))


@triton.jit
def exchange_rows(
    scores, places, own_out, all_out, lists, peers, rounds,
    N: tl.constexpr, K: tl.constexpr, RUN: tl.constexpr, ROWS: tl.constexpr, FAR: tl.constexpr, ROOM: tl.constexpr,
    WORDS: tl.constexpr, WAYS: tl.constexpr, NONE: tl.constexpr, BINS: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_W: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """One of up to ROWS rows. A message has FAR words: limits, BINS counts, the number of candidates, ROOM codes and as
    many tokens. Where a limit is infinite there are no bins, and all candidates are sent."""
    row = tl.program_id(0)
    phase = tl.load(rounds + row)
    own = tl.load(peers + WAYS).to(tl.int32)
    room = room_of(peers, own)
    index = tl.arange(0, BLOCK_N)
    score = tl.load(scores + row * N + index, mask=index < N, other=0.0)
    place = tl.load(places + row * N + index, mask=index < N, other=-1)
    valid = place >= 0
    score = tl.where(score != score, float("-inf"), score) + 0.0
    code = signed_order(score.to(tl.int32, bitcast=True))
    token = (place // RUN * WAYS + own) * RUN + place % RUN
    at = row * FAR
    low, largest = limits_of_all(peers, room, code, valid, at, phase, own, K, NONE, WORDS, WAYS)
    enters = valid & (code >= low)
    bins = bin_of(score, low, largest, BINS)
    least, above = least_bin_of_all(peers, room, bins, enters, at + 4, phase, own, K, BINS, NONE, WORDS, WAYS)
    sent = enters & (bins >= least)
    order = tl.cumsum(sent.to(tl.int32), 0) - 1
    count = tl.sum(sent.to(tl.int32), 0)
    at += 4 + BINS
    lane = tl.arange(0, 4)
    leave_word(peers, lane * 0 + count, at + lane, lane < 1, phase, own, WORDS, WAYS)
    at += 4
    leave_word(peers, code, at + order, sent, phase, own, WORDS, WAYS, False)
    leave_word(peers, token, at + ROOM + order, sent, phase, own, WORDS, WAYS, False)
    # Codes and tokens of all ranks, a line each, then room for the winners' tokens.
    lists += row * (3 * WAYS * N)
    counts = tl.zeros([BLOCK_W], tl.int32)
    lines = tl.arange(0, BLOCK_W)
    for rank in tl.static_range(WAYS):
        told = tl.sum(word_from(room, rank, at - 4 + lane, lane < 1, phase, own, NONE, WORDS, WAYS, False), 0)
        there = word_from(room, rank, at + index, index < told, phase, own, NONE, WORDS, WAYS, False)
        where = word_from(room, rank, at + ROOM + index, index < told, phase, own, NONE, WORDS, WAYS, False)
        line = lists + rank * N
        tl.store(line + index, there, mask=(index < told) & (own != rank))
        tl.store(line + WAYS * N + index, where, mask=(index < told) & (own != rank))
        tl.store(line + order, code, mask=sent & (own == rank))
        tl.store(line + WAYS * N + order, token, mask=sent & (own == rank))
        counts = tl.where(lines == rank, tl.where(own == rank, count, told), counts)
    tl.debug_barrier()
    line = lists + lines[:, None] * N + index[None, :]
    live = index[None, :] < counts[:, None]
    every = tl.load(line, mask=live, other=0)
    tokens = tl.load(line + WAYS * N, mask=live, other=0)
    value = signed_order(every).to(tl.float32, bitcast=True)
    which = bin_of(value, low, largest, BINS)
    cut, cut_token = last_winner(every, tokens, live & (which == least), K - above)
    wins = live & ((which > least) | (every > cut) | ((every == cut) & (tokens <= cut_token)))
    merge_lists(lists + 2 * WAYS * N, tokens, wins, all_out + row * K, N, K, WAYS, BLOCK_W, BLOCK_K, STEPS)
    mine = sent & ((bins > least) | (code > cut) | ((code == cut) & (token <= cut_token)))
    tl.store(own_out + row * K + tl.cumsum(mine.to(tl.int32), 0) - 1, place, mask=mine)
    column = tl.arange(0, BLOCK_K)
    number = tl.sum(mine.to(tl.int32), 0)
    tl.store(own_out + row * K + column, column * 0 - 1, mask=(column >= number) & (column < K))
    tl.store(rounds + row, 1 - phase)


def launch(scores, places, *, memory=torch):
    """The operator's tensors -> the rank's own places and all tokens, int32 [B, S, k] each."""
    constants, group = CONSTANTS["exchange_rows"], CONSTANTS["group"]
    device, rows = scores.device, CONSTANTS["rows"]
    own, all_ = (memory.empty(CONSTANTS["out"], dtype=torch.int32, device=device) for _ in range(2))
    lists = memory.empty(CONSTANTS["lists"], dtype=torch.int32, device=device)
    if device.type != "cuda":  # memory is planned: nothing runs
        return on_gpus_alone((own, all_), memory)
    place = meeting_place(group, constants["WORDS"], constants["ROWS"], constants["NONE"], device)
    if place is None:
        raise RuntimeError(
            f"ranks of '{group}' cannot write into one another's memory: --sp on GPUs needs GPUs of one machine with "
            "peer access, all of them visible to each process (CUDA_VISIBLE_DEVICES)"
        )
    lines = [tensor.view(rows, -1) for tensor in (scores, places, own, all_)]
    for first in range(0, rows, constants["ROWS"]):  # rows take turns in the room
        some = [line[first : first + constants["ROWS"]] for line in lines]
        exchange_rows[(len(some[0]),)](*some, lists, place[0], place[1], **constants, **CONSTANTS["options"])
    return own, all_
