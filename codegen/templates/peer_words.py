# pyright: basic, reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false
# Kernel text: inside @triton.jit, names are tensors of a language that type checkers do not know.
"""Words that ranks leave in one another's memory, and that say by their value that they have come.

Each rank has room for two rounds: [2, WAYS - 1, WORDS] words, a slot for each other rank, filled with a value that no
word has. A round is written while the one before may still be read; who has read a word of a round clears it at once.
A rank that is in a round has ended the one before it, and so have the others ended the last but one: the words that it
overwrites there were read and cleared.
"""

from importlib import import_module

import torch
import triton
import triton.language as tl


@triton.jit
def room_of(peers, rank):
    """Where the room of a rank begins; ``peers`` lists addresses, then the number of this rank."""
    return tl.load(peers + rank).to(tl.pointer_type(tl.int32))


@triton.jit
def place_in(room, slot, at, WORDS: tl.constexpr, SIDE_BY_SIDE: tl.constexpr, TYPE: tl.constexpr = tl.int32):
    """Places in a slot of a room, for words of TYPE, of which ``at`` counts.

    SIDE_BY_SIDE: ``at`` counts up from a multiple of 16 bytes, and so many go at a time.
    """
    FAR: tl.constexpr = (WORDS + 3) // 4 * 4
    place = (room + slot.to(tl.int64) * FAR).to(tl.pointer_type(TYPE)) + at
    if SIDE_BY_SIDE:
        place = tl.multiple_of(tl.max_contiguous(place, 128 // TYPE.primitive_bitwidth), 16)
    return place


@triton.jit
def leave_word(
    peers, word, at, live, phase, own, WORDS: tl.constexpr, WAYS: tl.constexpr, SIDE_BY_SIDE: tl.constexpr = True
):
    """Leave words of this rank, number ``own``, with every other rank. ``at`` counts words of their type."""
    for rank in tl.static_range(WAYS):
        slot = phase * (WAYS - 1) + own - (own > rank).to(tl.int32)
        place = place_in(room_of(peers, rank), slot, at, WORDS, SIDE_BY_SIDE, word.dtype)
        tl.store(place, word, mask=live & (own != rank), cache_modifier=".wt")


@triton.jit
def arrived(place, wanted, NONE: tl.constexpr, ALONE: tl.constexpr):
    """The ``wanted`` words at places of the own room, once all of them have come; their places are cleared.

    ALONE: one thread reads each word. Else some threads may have seen it come before others, which read it again.
    """
    word = tl.load(place, mask=wanted, other=0, volatile=True)
    while tl.max((word == NONE).to(tl.int32)) > 0:
        word = tl.load(place, mask=wanted, other=0, volatile=True)
    if not ALONE:
        tl.debug_barrier()
        word = tl.where(word == NONE, tl.load(place, mask=wanted & (word == NONE), other=0, volatile=True), word)
        tl.debug_barrier()
    tl.store(place, tl.full(word.shape, NONE, word.dtype), mask=wanted)
    return word


@triton.jit
def word_from(room, rank, at, live, phase, own, NONE: tl.constexpr, WORDS: tl.constexpr, WAYS: tl.constexpr):
    """Words of another rank; 0 where ``rank`` is this one."""
    slot = phase * (WAYS - 1) + rank - (rank > own).to(tl.int32)
    return arrived(place_in(room, slot, at, WORDS, True), live & (own != rank), NONE, True)


@triton.jit
def tell(peers, told, word, at, live, phase, own, WORDS: tl.constexpr, WAYS: tl.constexpr,
         SIDE_BY_SIDE: tl.constexpr = True):  # fmt: skip
    """Leave words with every other rank, and in ``told``, a slot of this rank's own that no other one sees."""
    leave_word(peers, word, at, live, phase, own, WORDS, WAYS, SIDE_BY_SIDE)
    tl.store(told.to(tl.pointer_type(word.dtype)) + at, word, mask=live)
    tl.debug_barrier()


@triton.jit
def heard(
    room, told, line, at, live, phase, own,
    NONE: tl.constexpr, WORDS: tl.constexpr, WAYS: tl.constexpr, TYPE: tl.constexpr = tl.int32,
):  # fmt: skip
    """What all ranks have told at places ``at`` [1, .], each on its ``line`` [., 1]; 0 behind the last rank's."""
    FAR: tl.constexpr = (WORDS + 3) // 4 * 4
    slot = phase * (WAYS - 1) + line - (line > own).to(tl.int32)
    slot = tl.where(line == own, told, room + slot.to(tl.int64) * FAR).to(tl.pointer_type(TYPE))
    SIZE: tl.constexpr = TYPE.primitive_bitwidth // 8
    place = tl.multiple_of(tl.max_contiguous(slot + at, [1, 16 // SIZE]), [SIZE, 16])
    none: tl.constexpr = NONE if SIZE == 4 else NONE * (1 << 32) + (NONE + (1 << 32))  # two words beside
    return arrived(place, live & (line < WAYS), none, False)


def meeting_place(group, words, programs, none, device):
    """Addresses of the ranks' rooms with this rank's number, and what round each program is in; None where ranks cannot
    write into one another's memory. All ranks must ask, and all get the same answer.

    Rooms are the process's, and stay until it leaves its groups: calls of one size share one, as they follow one
    another, and symmetric memory that is freed while a graph is captured ends the process (torch 2.11).
    """
    rooms = vars(import_module("torch.distributed._symmetric_memory")).setdefault("kimigraph_rooms", {})
    key = group, words, programs, none, device
    if key not in rooms:
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(f"ranks of '{group}' have not met yet: run the step once before it is captured")
        rooms[key] = _met(group, words, programs, none, device)
    return rooms[key]


def _met(group, words, programs, none, device):
    ranks = vars(import_module("torch._C._distributed_c10d"))["_resolve_process_group"](group)
    if not _reach_one_another(ranks, device):
        return None
    memory = import_module("torch.distributed._symmetric_memory")
    room = memory.empty(2 * (ranks.size() - 1) * (words + 3), dtype=torch.int32, device=device)
    room.fill_(none)
    handle = memory.rendezvous(room, ranks.group_name)
    peers = torch.tensor([*handle.buffer_ptrs, ranks.rank()], dtype=torch.int64, device=device)
    torch.cuda.synchronize(device)
    torch.distributed.barrier(ranks)
    return peers, torch.zeros(programs, dtype=torch.int32, device=device), room, handle


def _reach_one_another(ranks, device):
    """Whether all ranks are on GPUs of one machine, each of which can write into the memory of the others."""
    own = str(torch.cuda.get_device_properties(device).uuid)
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as machine:
        fact = machine.read(), own
    found = [None] * ranks.size()
    torch.distributed.all_gather_object(found, fact, ranks)
    seen = {str(torch.cuda.get_device_properties(at).uuid): at for at in range(torch.cuda.device_count())}
    others = [other for _, other in found if other != own]
    near = len(others) == len(found) - 1 and len({name for name, _ in found}) == 1
    near = near and all(at in seen and torch.cuda.can_device_access_peer(device.index, seen[at]) for at in others)
    torch.distributed.all_gather_object(found, near, ranks)
    return all(found)


def on_gpus_alone(results, memory):
    """What a launch without data gives while memory is planned; a CPU's tensors cannot be exchanged by it."""
    if memory is torch:
        raise RuntimeError("this kernel exchanges words of GPUs: use the target cpu:reference for ranks on CPUs")
    return results
