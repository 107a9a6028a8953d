"""The tables of a batch, which kernels read: where the rows' pages and states are, and how long the rows are."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kimigraph.ir.errors import UsageError
from kimigraph.runtime.sequence.errors import SequenceError
from kimigraph.runtime.sequence.handle import SequenceHandle
from kimigraph.runtime.sequence.paged_cache import PagedCache, PageTable
from kimigraph.runtime.sequence.pages import SCRATCH_PAGE
from kimigraph.runtime.sequence.state_pool import NULL_SLOT, StatePool

UNMAPPED = -1


class BatchTables:
    """Three int32 tensors of ``rows`` rows on the pools' device, updated in place, so that a CUDA graph may hold them.

    ``block_table`` [rows, columns]: page numbers, then -1. ``lengths`` [rows]: tokens before the step. ``slots``
    [rows]: entries of the states. A row without a sequence is padded: every page of it is the scratch page, its length
    is 0, its slot the null slot.
    """

    def __init__(self, cache: PagedCache, states: StatePool, rows: int) -> None:
        if rows < 1:
            raise UsageError(f"batch tables: rows is {rows}; want at least 1")
        self._cache, self._states = cache, states
        # Rows are made on the host and sent as one tensor; only those of which the pages changed are made again.
        with torch.inference_mode(False):
            self._host = torch.full((rows, cache.columns), SCRATCH_PAGE, dtype=torch.int32)
            self.block_table: Tensor = self._host.to(cache.device, copy=True)
            self.lengths: Tensor = torch.zeros(rows, dtype=torch.int32, device=cache.device)
            self.slots: Tensor = torch.full((rows,), NULL_SLOT, dtype=torch.int32, device=cache.device)
        self._shown: list[tuple[PageTable | None, int]] = [(None, 0)] * rows

    @property
    def rows(self) -> int:
        """Sequences that a step takes at most."""
        return len(self._shown)

    def bind(self, sequences: Sequence[SequenceHandle | None]) -> None:
        """Show ``sequences`` in this order; rows of None and those that are left over are padded.

        Call it before every step, after ``reserve``. SequenceError, with nothing changed, for a sequence that has left
        or stands twice; UsageError for more sequences than rows.
        """
        self._require(sequences)
        padded = [*sequences, *[None] * (self.rows - len(sequences))]
        changed = False
        for row, sequence in enumerate(padded):
            table = None if sequence is None else sequence.table
            shown = (table, 0 if table is None else table.version)
            if shown != self._shown[row]:
                self._show(row, table)
                self._shown[row] = shown
                changed = True
        if changed:
            self.block_table.copy_(self._host)
        lengths = [0 if sequence is None else sequence.length for sequence in padded]
        slots = [NULL_SLOT if sequence is None else sequence.slot.index for sequence in padded]
        self.lengths.copy_(torch.tensor(lengths, dtype=torch.int32))
        self.slots.copy_(torch.tensor(slots, dtype=torch.int32))

    def _show(self, row: int, table: PageTable | None) -> None:
        if table is None:
            self._host[row] = SCRATCH_PAGE
            return
        self._host[row] = UNMAPPED
        self._host[row, : len(table.pages)] = torch.tensor(table.pages, dtype=torch.int32)

    def _require(self, sequences: Sequence[SequenceHandle | None]) -> None:
        if len(sequences) > self.rows:
            raise UsageError(f"batch of {len(sequences)} sequences for tables of {self.rows} rows; make larger ones")
        live = [sequence for sequence in sequences if sequence is not None]
        for sequence in live:
            self._cache.require(sequence.table)
            self._states.require(sequence.slot)
        if len(set(live)) < len(live):
            raise SequenceError("batch: a sequence stands in two rows, which would both write its states; fork it")
