# pyright: basic
# Kernel text: inside @triton.jit, names are tensors of a language that type checkers do not know.
"""Parts of ranks side by side, in one launch: each leaves its own with the others and brings theirs to their places."""

from typing import Any

import torch
import triton
import triton.language as tl

from kimigraph.codegen.templates.peer_words import leave_word, meeting_place, on_gpus_alone, room_of, word_from

CONSTANTS: dict[str, Any] = {}
LIBRARY = "_c10d_functional"


@triton.jit
def gather_ranks(
    part, out, peers, rounds,
    WORDS: tl.constexpr, RUN: tl.constexpr, WAYS: tl.constexpr, NONE: tl.constexpr, INSTEAD: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK words of 32 bits; RUN of a rank stand together in the result. A word that is NONE is INSTEAD."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = at < WORDS
    phase = tl.load(rounds + tl.program_id(0))
    own = tl.load(peers + WAYS).to(tl.int32)
    word = tl.load(part + at, mask=live, other=0)
    word = tl.where(word == NONE, INSTEAD, word)
    leave_word(peers, word, at, live, phase, own, WORDS, WAYS)
    room = room_of(peers, own)
    place = out + (at // RUN).to(tl.int64) * (RUN * WAYS) + at % RUN
    tl.store(place + own * RUN, word, mask=live)
    for rank in tl.static_range(WAYS):
        there = word_from(room, rank, at, live, phase, own, NONE, WORDS, WAYS)
        tl.store(place + rank * RUN, there, mask=live & (own != rank))
    tl.store(rounds + tl.program_id(0), 1 - phase)


def launch(part, *, memory=torch):
    """The operator's tensor -> all parts."""
    constants, group = CONSTANTS["gather_ranks"], CONSTANTS["group"]
    words, programs, ways = constants["WORDS"], CONSTANTS["grid"][0], constants["WAYS"]
    out = memory.empty(CONSTANTS["out"], dtype=part.dtype, device=part.device)
    if part.device.type != "cuda":  # memory is planned: nothing runs
        return on_gpus_alone(out, memory)
    place = meeting_place(group, words, programs, constants["NONE"], part.device)
    if place is None:
        collectives = getattr(torch.ops, LIBRARY)
        pending = collectives.all_gather_into_tensor.default(part, ways, group)
        return torch.cat(collectives.wait_tensor.default(pending).chunk(ways), CONSTANTS["dim"], out=out)
    given, got = part.view(-1).view(torch.int32), out.view(-1).view(torch.int32)
    gather_ranks[CONSTANTS["grid"]](given, got, place[0], place[1], **constants, **CONSTANTS["options"])
    return out
