# pyright: basic
# Kernel text: inside @triton.jit, names are tensors of a language that type checkers do not know.
"""The sum of what ranks have, in one launch: each leaves its addend with the others and adds theirs to its own."""

from typing import Any

import torch
import triton
import triton.language as tl

from kimigraph.codegen.templates.peer_words import leave_word, meeting_place, on_gpus_alone, room_of, word_from

CONSTANTS: dict[str, Any] = {}
LIBRARY = "_c10d_functional"


@triton.jit
def sum_ranks(
    addend, out, peers, rounds,
    WORDS: tl.constexpr, WAYS: tl.constexpr, NONE: tl.constexpr, PAIRS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK words of 32 bits, two bf16 each where PAIRS. No word is NONE, a NaN: it is another NaN instead."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = at < WORDS
    phase = tl.load(rounds + tl.program_id(0))
    own = tl.load(peers + WAYS).to(tl.int32)
    word = tl.load(addend + at, mask=live, other=0)
    word = tl.where(word == NONE, 0x7FFF7FFF, word)
    leave_word(peers, word, at, live, phase, own, WORDS, WAYS)
    room = room_of(peers, own)
    high = tl.full([BLOCK], -0.0, tl.float32)  # which leaves the first addend's sign
    low = tl.full([BLOCK], -0.0, tl.float32)
    for rank in tl.static_range(WAYS):
        there = word_from(room, rank, at, live, phase, own, NONE, WORDS, WAYS)
        there = tl.where(own == rank, word, there)
        if PAIRS:
            low += (there << 16).to(tl.float32, bitcast=True)
            high += (there & -65536).to(tl.float32, bitcast=True)
        else:
            high += there.to(tl.float32, bitcast=True)
    if PAIRS:
        first = low.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        second = high.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) << 16
        tl.store(out + at, first | second, mask=live)
    else:
        tl.store(out + at, high.to(tl.int32, bitcast=True), mask=live)
    tl.store(rounds + tl.program_id(0), 1 - phase)


def launch(addend, *, memory=torch):
    """The operator's tensor -> the sum, of its shape."""
    constants, group = CONSTANTS["sum_ranks"], CONSTANTS["group"]
    words, programs = constants["WORDS"], CONSTANTS["grid"][0]
    out = memory.empty(CONSTANTS["out"], dtype=addend.dtype, device=addend.device)
    if addend.device.type != "cuda":  # memory is planned: nothing runs
        return on_gpus_alone(out, memory)
    place = meeting_place(group, words, programs, constants["NONE"], addend.device)
    if place is None:
        collectives = getattr(torch.ops, LIBRARY)
        out.copy_(collectives.wait_tensor.default(collectives.all_reduce.default(addend, "sum", group)))
        return out
    given, got = addend.view(-1).view(torch.int32), out.view(-1).view(torch.int32)
    sum_ranks[CONSTANTS["grid"]](given, got, place[0], place[1], **constants, **CONSTANTS["options"])
    return out
