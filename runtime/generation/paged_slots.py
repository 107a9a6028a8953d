"""Slots whose caches are pages of one pool: sequences take what their tokens need, and forks share what they have."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kimigraph.ir.descriptors import Descriptor
from kimigraph.ir.errors import KimigraphError
from kimigraph.ir.program import BLOCK_TABLE
from kimigraph.runtime.generation.slots import Row, SlotCaches
from kimigraph.runtime.sequence.batch import UNMAPPED
from kimigraph.runtime.sequence.errors import SequenceError
from kimigraph.runtime.sequence.paged_cache import PagedCache, PageTable
from kimigraph.runtime.sequence.pages import SCRATCH_PAGE


@dataclass(frozen=True)
class Pool:
    """What pages are made for: descriptors of caches by flat name, how many pages, and the most tokens a sequence.

    ``ranks`` share out the tokens of each page.
    """

    caches: Mapping[str, Descriptor | str]
    pages: int
    context: int
    debug: bool = False
    ranks: int = 1


class PagedSlots:
    """As ``SlotCaches``, but caches that ``pool`` names lie in pages, and rows hold the rest (states).

    A sequence gets pages for all the tokens that it may have when it begins or is forked; a fork shares the full pages
    of its original, and the page that it would write next is copied. A step takes the pages, and the block table of its
    rows (``block_table``), in tensors that stay where they are. Rows without a sequence use the scratch page.
    """

    def __init__(
        self,
        rows: Mapping[str, Row],
        pool: Pool,
        slots: int,
        device: torch.device | str = "cpu",
        given: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.slots = slots
        try:
            self.cache = PagedCache(
                pool.caches, pool.pages, pool.context, device=device, debug=pool.debug, ranks=pool.ranks
            )
        except torch.OutOfMemoryError as error:
            raise KimigraphError(
                f"a pool of {pool.pages} pages is more than {device} has room for: allow fewer (pages)"
            ) from error
        self._rows = SlotCaches(rows, slots, device, given)
        self._pages = pool.pages
        with torch.inference_mode(False):
            self._tables_on_device = [
                torch.full((seats, self.cache.columns), SCRATCH_PAGE, dtype=torch.int32, device=device)
                for seats in (slots, 1)  # each begins where a tensor of its own does: programs count on that
            ]
        self._tables: list[PageTable | None] = [None] * (slots + 1)
        self.staging: dict[str, Tensor] = self._tensors(self._rows.staging, self._tables_on_device[1])
        self._views: dict[int, dict[str, Tensor]] = {}

    @property
    def free_slots(self) -> int:
        """Slots that no sequence has."""
        return self._rows.free_slots

    def first(self, rows: int) -> dict[str, Tensor]:
        """The tensors of a step over the first ``rows`` slots."""
        if rows not in self._views:
            self._views[rows] = self._tensors(self._rows.first(rows), self._tables_on_device[0][:rows])
        return self._views[rows]

    def holds(self, tokens: int) -> bool:
        """Whether all pages together hold so many tokens."""
        return self.cache.pages_for(tokens) <= self._pages

    def begin(self, tokens: int) -> None:
        """Make the staging place that of a sequence without tokens, with pages for ``tokens``."""
        table = self.cache.new_table()
        self._reserve(table, tokens)
        self._rows.begin()
        self._show(self.slots, table)

    def abandon(self) -> None:
        """The sequence in the staging place is over."""
        self._drop(self.slots)

    def read(self, tokens: int) -> None:
        """The sequence in the staging place has got so many tokens."""
        table = self._table(self.slots)
        self.cache.reserve({table: tokens})
        self.cache.commit({table: tokens})

    def seat(self) -> int:
        """Give the sequence in the staging place the lowest free slot; its pages stay where they are."""
        slot = self._rows.seat()
        table = self._table(self.slots)
        self._show(slot, table)
        self._show(self.slots, None)
        return slot

    def step(self, slots: Iterable[int]) -> None:
        """The sequences in those slots have got a token each."""
        tables = {self._table(slot): 1 for slot in slots}
        self.cache.reserve(tables)
        self.cache.commit(tables)

    def fork(self, slot: int, tokens: int) -> int:
        """A second sequence like the one in ``slot``: states are copied, full pages shared."""
        origin = self._table(slot)
        table = self.cache.fork(origin)
        self._reserve(table, tokens)
        try:
            other = self._rows.fork(slot)
        except Exception:
            self.cache.free(table)
            raise
        self._show(other, table)
        return other

    def lower(self, slot: int) -> int:
        """Move the sequence in ``slot`` to the lowest free one, where that is below it; returns where it is then."""
        target = self._rows.lower(slot)
        if target != slot:
            self._show(target, self._table(slot))
            self._show(slot, None)
        return target

    def free(self, slot: int) -> None:
        """The sequence in ``slot`` is over."""
        self._rows.free(slot)
        self._drop(slot)

    def _reserve(self, table: PageTable, tokens: int) -> None:
        """Pages up to ``tokens`` tokens, and a copy of the shared one that comes next; without room ``table`` goes."""
        try:
            self.cache.reserve({table: max(tokens - table.length, 0)})
        except Exception:
            self.cache.free(table)
            raise
        self.cache.reserve({table: 0})  # the pages stay, no step is running

    def _table(self, place: int) -> PageTable:
        table = self._tables[place]
        if table is None:
            raise SequenceError(f"slot {place} of {self.slots} has no sequence")
        return table

    def _drop(self, place: int) -> None:
        table = self._table(place)
        self._show(place, None)
        self.cache.free(table)

    def _show(self, place: int, table: PageTable | None) -> None:
        self._tables[place] = table
        row = torch.full((self.cache.columns,), SCRATCH_PAGE if table is None else UNMAPPED, dtype=torch.int32)
        if table is not None:
            row[: len(table.pages)] = torch.tensor(table.pages, dtype=torch.int32)
        seats, staging = self._tables_on_device
        (staging[0] if place == self.slots else seats[place]).copy_(row)

    def _tensors(self, rows: Mapping[str, Tensor], tables: Tensor) -> dict[str, Tensor]:
        return {**self.cache.tensors, **rows, BLOCK_TABLE: tables}
