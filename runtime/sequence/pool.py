"""Sequences that have pages and a state slot, in both pools or in neither."""

from collections.abc import Mapping

from torch import Tensor

from kimigraph.ir.errors import UsageError
from kimigraph.runtime.sequence.batch import BatchTables
from kimigraph.runtime.sequence.errors import SequenceError
from kimigraph.runtime.sequence.handle import SequenceHandle
from kimigraph.runtime.sequence.paged_cache import PagedCache, PageTable
from kimigraph.runtime.sequence.state_pool import StatePool, StateSlot


class SequencePool:
    """All that sequences carry from step to step: ``cache`` and ``states``, which lie on one device.

    A round: ``reserve`` room for the sequences of the step, ``bind`` them to a batch's tables, run the step, ``commit``
    the tokens that stay. To be able to go back behind a step, ``fork`` before it and drop one of the two after it.
    Every method changes both pools or, when it raises, neither.
    """

    def __init__(self, cache: PagedCache, states: StatePool) -> None:
        if cache.device != states.device:
            raise UsageError(f"the caches lie on {cache.device} and the states on {states.device}; want one device")
        self.cache, self.states = cache, states

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The buffers of both pools by flat name."""
        return {**self.cache.tensors, **self.states.tensors}

    def batch(self, rows: int) -> BatchTables:
        """Tables for steps over ``rows`` rows, all padded until sequences are bound to them."""
        return BatchTables(self.cache, self.states, rows)

    def join(self, tokens: int = 0) -> SequenceHandle:
        """A new sequence without tokens, with room reserved for ``tokens`` (its prompt, or the first chunk of it)."""
        slot = self.states.allocate()
        table = self.cache.new_table()
        try:
            self.cache.reserve({table: tokens})
        except Exception:
            self.cache.free(table)
            self.states.free(slot)
            raise
        return SequenceHandle(table, slot)

    def reserve(self, tokens: Mapping[SequenceHandle, int]) -> None:
        """Room for that many tokens behind each sequence, for all of them or for none: ``PagedCache.reserve``."""
        self.cache.reserve(_tables(tokens))

    def commit(self, tokens: Mapping[SequenceHandle, int]) -> None:
        """That many tokens of each sequence have been written: ``PagedCache.commit``."""
        self.cache.commit(_tables(tokens))

    def fork(self, sequence: SequenceHandle) -> SequenceHandle:
        """A sequence with the same tokens and states; pages are shared until one of the two writes them."""
        slot = self.states.fork(sequence.slot)
        try:
            return SequenceHandle(self.cache.fork(sequence.table), slot)
        except Exception:
            self.states.free(slot)
            raise

    def truncate(self, sequence: SequenceHandle, length: int, states: StateSlot | None = None) -> None:
        """Take back all tokens from ``length`` on, and what was reserved.

        Recurrent states have no past: unless ``length`` is 0 (they are reset) or the length as it is (they stay),
        ``states`` is a slot with the states after ``length`` tokens, which are copied. SequenceError without it.
        """
        self.states.require(sequence.slot)
        shorter = length < sequence.length
        if states is not None:
            self.states.require(states)
        elif shorter and length > 0 and self.states.tensors:
            raise SequenceError(
                f"truncation from {sequence.length} to {length} tokens: recurrent states cannot be taken back; fork"
                " before the tokens that may go, or give a slot with the states at that length"
            )
        self.cache.truncate(sequence.table, length)
        if states is not None:
            self.states.copy(states, sequence.slot)
        elif shorter and length == 0:
            self.states.reset(sequence.slot)

    def leave(self, sequence: SequenceHandle) -> None:
        """The sequence is over, done or aborted: its pages (those of no fork) and its slot are free."""
        self.states.require(sequence.slot)
        self.cache.free(sequence.table)
        self.states.free(sequence.slot)


def _tables(tokens: Mapping[SequenceHandle, int]) -> dict[PageTable, int]:
    return {sequence.table: count for sequence, count in tokens.items()}
