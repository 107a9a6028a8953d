"""Caches and states of a running batch: a sequence has one row of every tensor."""

import heapq
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kimigraph.ir.errors import KimigraphError
from kimigraph.runtime.sequence.errors import PoolExhaustedError, SequenceError


@dataclass(frozen=True)
class Row:
    """What one sequence has of a tensor: its shape, without the batch, and type."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Slots(Protocol):
    """Where the sequences of an engine live: in one of ``slots`` seats, or in the staging place while their prompt is
    read. Methods raise PoolExhaustedError where there is no room, and have then changed nothing."""

    slots: int
    staging: dict[str, Tensor]
    """Tensors of a step over the sequence that is being read, alone."""

    @property
    def free_slots(self) -> int:
        """Seats that no sequence has."""
        ...

    def first(self, rows: int) -> dict[str, Tensor]:
        """Tensors of a step over the first ``rows`` seats."""
        ...

    def holds(self, tokens: int) -> bool:
        """Whether a sequence of so many tokens could run if it were alone."""
        ...

    def begin(self, tokens: int) -> None:
        """Make the staging place that of a sequence without tokens, with room for ``tokens``."""
        ...

    def abandon(self) -> None:
        """The sequence in the staging place is over."""
        ...

    def read(self, tokens: int) -> None:
        """The sequence in the staging place has got so many tokens."""
        ...

    def seat(self) -> int:
        """Give the sequence in the staging place the lowest free seat, over all that stood there."""
        ...

    def step(self, slots: Iterable[int]) -> None:
        """The sequences in those seats have got a token each."""
        ...

    def fork(self, slot: int, tokens: int) -> int:
        """A second sequence like the one in ``slot``, with room for ``tokens`` in all; the seat that it got."""
        ...

    def lower(self, slot: int) -> int:
        """Move the sequence in ``slot`` to the lowest free seat, where that is below it; returns where it is then."""
        ...

    def free(self, slot: int) -> None:
        """The sequence in ``slot`` is over. SequenceError where none is."""
        ...


class SlotCaches:
    """``slots`` rows of each tensor, and one row apart from them (``staging``) in which a prompt is read.

    A step over the first n slots takes ``first(n)``: no tensor moves when n changes. The lowest free slot is given
    first. Tensors stay where they are for the life of the object. ``given`` has those that lie elsewhere already.
    """

    def __init__(
        self,
        rows: Mapping[str, Row],
        slots: int,
        device: torch.device | str = "cpu",
        given: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.slots, there = slots, given or {}
        size = sum(torch.Size(row.shape).numel() * row.dtype.itemsize for row in rows.values())
        try:
            self.tensors = {
                name: there[name] if name in there else torch.zeros(slots, *row.shape, dtype=row.dtype, device=device)
                for name, row in rows.items()
            }
            self.staging = {
                name: torch.zeros(1, *row.shape, dtype=row.dtype, device=device) for name, row in rows.items()
            }
        except torch.OutOfMemoryError as error:
            raise KimigraphError(
                f"caches for {slots} sequences and the one being read take {(slots + 1) * size / 1e9:.1f} GB, which "
                f"{device} has not: allow fewer (max_batch) or shorter ones (context)"
            ) from error
        self._free = list(range(slots))
        self._views: dict[int, dict[str, Tensor]] = {}

    @property
    def free_slots(self) -> int:
        """Slots that no sequence has."""
        return len(self._free)

    def first(self, rows: int) -> dict[str, Tensor]:
        """The first ``rows`` slots of every tensor, as views."""
        if rows not in self._views:
            self._views[rows] = {name: tensor[:rows] for name, tensor in self.tensors.items()}
        return self._views[rows]

    def holds(self, tokens: int) -> bool:
        """True: every row has room for the whole context."""
        return True

    def allocate(self) -> int:
        """The lowest free slot; PoolExhaustedError when there is none, and nothing has changed."""
        if not self._free:
            raise PoolExhaustedError("slot", 1, 0, self.slots, "max_batch")
        return heapq.heappop(self._free)

    def free(self, slot: int) -> None:
        """The sequence in ``slot`` is over."""
        self._require(slot)
        heapq.heappush(self._free, slot)

    def begin(self, tokens: int = 0) -> None:
        """Make the staging row that of a sequence without tokens."""
        for tensor in self.staging.values():
            tensor.zero_()

    def abandon(self) -> None:
        """Nothing is held for the staging row."""

    def read(self, tokens: int) -> None:
        """Rows know no lengths."""

    def step(self, slots: Iterable[int]) -> None:
        """Rows know no lengths."""

    def seat(self) -> int:
        """Copy the staging row into the lowest free slot, over all that stood there."""
        slot = self.allocate()
        for name, tensor in self.tensors.items():
            tensor[slot].copy_(self.staging[name][0])
        return slot

    def fork(self, slot: int, tokens: int = 0) -> int:
        """Copy a row into the lowest free slot."""
        self._require(slot)
        other = self.allocate()
        self._copy(slot, other)
        return other

    def lower(self, slot: int) -> int:
        """Move the sequence in ``slot`` to the lowest free one, where that is below it; returns where it is then."""
        if not self._free or self._free[0] > slot:
            return slot
        target = self.allocate()
        self._copy(slot, target)
        self.free(slot)
        return target

    def _require(self, slot: int) -> None:
        if slot in self._free or not 0 <= slot < self.slots:
            raise SequenceError(f"slot {slot} of {self.slots} is free already, or none of this batch")

    def _copy(self, source: int, target: int) -> None:
        for tensor in self.tensors.values():
            tensor[target].copy_(tensor[source])
