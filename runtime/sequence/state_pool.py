"""Recurrent states and convolutions of all KDA layers, a sequence having one slot in all of them."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kimigraph.ir.descriptors import Descriptor
from kimigraph.ir.errors import UsageError
from kimigraph.runtime.sequence.buffers import Buffers, entry_bytes, slot_entries
from kimigraph.runtime.sequence.errors import PoolExhaustedError, SequenceError

NULL_SLOT = 0
"""The slot of padded rows: operators neither read nor write it."""


@dataclass(frozen=True, eq=False)
class StateSlot:
    """The states of one sequence: entry ``index`` of every tensor of the pool."""

    index: int


class StatePool:
    """``tensors`` by flat name (``state.<layer>.kda|conv``), each [slots + 1, ...]; slot 0 is the null slot.

    ``descriptors`` are those of states and convolutions; a convolution holds ``conv_dtype``. A slot is reset, copied
    and freed as one object over all layers; a new one is zero, whatever stood there before. Without descriptors (a
    model that has no recurrent layer) the pool only counts sequences.

    In ``debug`` mode free slots hold NaN. Raises UsageError for other descriptors; methods raise PoolExhaustedError
    when slots run out and SequenceError for a slot that was freed, and have then changed nothing.
    """

    def __init__(
        self,
        descriptors: Mapping[str, Descriptor | str],
        slots: int,
        *,
        conv_dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
        debug: bool = False,
    ) -> None:
        if slots < 1:
            raise UsageError(f"state pool: slots is {slots}; want at least 1")
        entries = slot_entries(descriptors, conv_dtype)
        self.total, self.debug = slots, debug
        self.slot_bytes = entry_bytes(entries)
        """Bytes of one slot over all layers."""
        self._buffers = Buffers(entries, slots + 1, device)
        self._free = list(range(slots, 0, -1))
        self._slots: set[StateSlot] = set()
        if debug:
            self._buffers.poison(self._free)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The states by flat name; they stay where they are for the life of the pool."""
        return self._buffers.tensors

    @property
    def device(self) -> torch.device:
        """Where the states lie."""
        return self._buffers.device

    @property
    def free_slots(self) -> int:
        """Slots that no sequence has."""
        return len(self._free)

    def allocate(self) -> StateSlot:
        """A slot of zeros: the states of a sequence without tokens."""
        index = self._next_free()
        self._buffers.clear([index])
        return self._take()

    def fork(self, slot: StateSlot) -> StateSlot:
        """A new slot with the same states."""
        self.require(slot)
        self._buffers.copy([(slot.index, self._next_free())])
        return self._take()

    def copy(self, source: StateSlot, destination: StateSlot) -> None:
        """Make the states of ``destination`` those of ``source``."""
        self.require(source)
        self.require(destination)
        if source is not destination:
            self._buffers.copy([(source.index, destination.index)])

    def reset(self, slot: StateSlot) -> None:
        """Make the states those of a sequence without tokens."""
        self.require(slot)
        self._buffers.clear([slot.index])

    def free(self, slot: StateSlot) -> None:
        """The states are no longer wanted; any later use of ``slot`` is a SequenceError."""
        self.require(slot)
        self._slots.remove(slot)
        self._free.append(slot.index)
        if self.debug:
            self._buffers.poison([slot.index])

    def require(self, slot: StateSlot) -> None:
        """SequenceError unless ``slot`` is one of this pool that has not been freed."""
        if slot not in self._slots:
            raise SequenceError(f"state slot {slot.index} was freed, or belongs to another pool; allocate a new one")

    def _next_free(self) -> int:
        if not self._free:
            raise PoolExhaustedError("state slot", 1, 0, self.total, "StatePool(slots=...)")
        return self._free[-1]

    def _take(self) -> StateSlot:
        slot = StateSlot(self._free.pop())
        self._slots.add(slot)
        return slot
