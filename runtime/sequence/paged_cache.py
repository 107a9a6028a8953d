"""Caches of all layers in pages, under one page table a sequence."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kimigraph.ir.descriptors import Descriptor
from kimigraph.ir.errors import UsageError
from kimigraph.runtime.sequence.buffers import Buffers, entry_bytes, page_entries
from kimigraph.runtime.sequence.errors import SequenceError
from kimigraph.runtime.sequence.pages import SCRATCH_PAGE, PageCounts


@dataclass(eq=False)
class PageTable:
    """One sequence's places: position p is row p % page of page ``pages[p // page]``, in every buffer of every layer.

    Only its PagedCache changes it. ``length`` tokens are there; from there up to ``reserved`` the next step may write.
    ``version`` changes when ``pages`` does.
    """

    pages: list[int] = field(default_factory=lambda: [])
    length: int = 0
    reserved: int = 0
    version: int = 0


class PagedCache:
    """Latents, rope parts and index keys of all layers, ``tensors`` by flat name, each [pages + 1, page, row].

    ``descriptors`` gives each buffer's layout by flat name (``cache.<layer>.latent|rope|index_key``), bf16, fp16, fp32
    or quantised; all have one page size. ``pages`` are for sequences; page 0 beside them is the scratch page of padded
    rows. A sequence holds ``context`` tokens at most. A step is: ``reserve`` room behind the length, write it, then
    ``commit``; without a commit the tokens are not there, and ``truncate`` to the length gives their room back.

    A fork shares the pages of its original; who next writes a shared page gets a copy first, in all buffers.

    ``ranks`` that share out sequences each have a part of every page, as the descriptors say; they make the same moves.

    In ``debug`` mode free pages hold NaN, and every change checks the tables. Raises UsageError for descriptors that
    do not go together; methods raise SequenceError for wrong use and PoolExhaustedError when pages run out, and have
    then changed nothing. Not for several threads at once; on a GPU all work goes to the current stream.
    """

    def __init__(
        self,
        descriptors: Mapping[str, Descriptor | str],
        pages: int,
        context: int,
        *,
        device: torch.device | str = "cpu",
        debug: bool = False,
        ranks: int = 1,
    ) -> None:
        own, entries = page_entries(descriptors)
        self.page_size = own * ranks
        if pages < 1 or context < 1:
            raise UsageError(f"paged cache: pages is {pages} and context {context}; want at least 1 of each")
        self.context, self.debug = context, debug
        self.page_bytes = entry_bytes(entries)
        """Bytes of one page over all buffers."""
        self._buffers = Buffers(entries, pages + 1, device)
        self._counts = PageCounts(pages)
        self._tables: set[PageTable] = set()
        if debug:
            self._buffers.poison(self._counts.free)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The buffers by flat name; they stay where they are for the life of the cache."""
        return self._buffers.tensors

    @property
    def device(self) -> torch.device:
        """Where the buffers lie."""
        return self._buffers.device

    @property
    def free_pages(self) -> int:
        """Pages that no sequence has."""
        return len(self._counts.free)

    @property
    def columns(self) -> int:
        """Entries of a page table that covers the whole context."""
        return self.pages_for(self.context)

    def pages_for(self, tokens: int) -> int:
        """Pages that hold ``tokens`` tokens."""
        return -(-tokens // self.page_size)

    def new_table(self) -> PageTable:
        """A sequence without tokens, and without pages yet."""
        table = PageTable()
        self._tables.add(table)
        return table

    def pages_wanted(self, tokens: Mapping[PageTable, int]) -> int:
        """Free pages that ``reserve`` of the same would take."""
        fresh, copied = self._plan(tokens)
        return sum(fresh.values()) + len(copied)

    def reserve(self, tokens: Mapping[PageTable, int]) -> None:
        """Make room for that many tokens behind each sequence's length, for all of them or for none.

        Pages are mapped as far as the tokens reach, and a page that they share with a fork is copied. Asking again
        before a commit replaces what was asked.
        """
        fresh, copied = self._plan(tokens)
        wanted = sum(fresh.values()) + len(copied)
        pages = iter(self._counts.next_free(wanted))
        targets = [(table, place, next(pages)) for table, place in copied]
        # The copy comes before the books change, so that when it fails they are as they were.
        self._buffers.copy([(table.pages[place], page) for table, place, page in targets])
        self._counts.take(wanted)
        for table, place, page in targets:
            self._counts.release([table.pages[place]])
            table.pages[place] = page
            table.version += 1
        for table, count in fresh.items():
            table.pages += [next(pages) for _ in range(count)]
            table.version += count > 0
            table.reserved = table.length + tokens[table]
        self._verify()

    def commit(self, tokens: Mapping[PageTable, int]) -> None:
        """That many tokens behind each length have been written and are there now; what else was reserved lapses."""
        for table, count in tokens.items():
            self.require(table)
            if not 0 <= count <= table.reserved - table.length:
                raise SequenceError(
                    f"commit of {count} tokens behind {table.length}: {table.reserved - table.length} are reserved;"
                    " reserve before the step that writes them"
                )
        for table, count in tokens.items():
            table.length += count
            table.reserved = table.length

    def fork(self, table: PageTable) -> PageTable:
        """A sequence with the same tokens, in the same pages. SequenceError while room is reserved for a step."""
        self.require(table)
        if table.reserved > table.length:
            raise SequenceError(
                f"fork of a sequence with {table.reserved - table.length} reserved tokens, whose pages a running step"
                " may write: commit them first, or truncate to the length"
            )
        pages = table.pages[: self.pages_for(table.length)]
        self._counts.share(pages)
        other = PageTable(pages, table.length, table.length)
        self._tables.add(other)
        self._verify()
        return other

    def truncate(self, table: PageTable, length: int) -> None:
        """Take back all tokens from ``length`` on, and all that was reserved; pages that hold nothing then go."""
        self.require(table)
        if not 0 <= length <= table.length:
            raise SequenceError(f"truncation to {length} of a sequence of {table.length} tokens; want 0 to its length")
        kept = self.pages_for(length)
        dropped = table.pages[kept:]
        del table.pages[kept:]
        table.version += len(dropped) > 0
        table.length = table.reserved = length
        self._release(dropped)

    def free(self, table: PageTable) -> None:
        """The sequence is over; any later use of ``table`` is a SequenceError."""
        self.require(table)
        self._tables.remove(table)
        dropped, table.pages = table.pages, []
        self._release(dropped)

    def require(self, table: PageTable) -> None:
        """SequenceError unless ``table`` is a sequence of this cache that has not been freed."""
        if table not in self._tables:
            raise SequenceError("page table: its sequence was freed, or belongs to another cache; make a new one")

    def check(self) -> None:
        """SequenceError where the tables and the books disagree: a table names a free page, a count is wrong."""
        named = [0] * (self._counts.total + 1)
        for table in self._tables:
            for page in table.pages:
                named[page] += 1
        for page, (tables, count) in enumerate(zip(named, self._counts.counts, strict=True)):
            if tables != count or (page == SCRATCH_PAGE and tables):
                raise SequenceError(f"page {page}: {tables} tables name it, the count says {count}")
        if sorted(self._counts.free) != [page for page in range(1, len(named)) if named[page] == 0]:
            raise SequenceError("the free list is not the list of pages that no table names")

    def check_table(self, block_table: Tensor) -> None:
        """SequenceError when a block table [B, N] names a page that is free, or none of this cache; for debugging."""
        for row, pages in enumerate(block_table.tolist()):
            for column, page in enumerate(pages):
                known = page < len(self._counts.counts)
                if page > SCRATCH_PAGE and not (known and self._counts.counts[page]):
                    reason = "is free" if known else "does not exist"
                    raise SequenceError(
                        f"block table: row {row}, column {column} names page {page}, which {reason};"
                        " the table is older than the last change: bind the batch again"
                    )

    def _plan(self, tokens: Mapping[PageTable, int]) -> tuple[dict[PageTable, int], list[tuple[PageTable, int]]]:
        """Fresh pages by table, and the (table, place) of the shared pages that are written next."""
        fresh: dict[PageTable, int] = {}
        copied: list[tuple[PageTable, int]] = []
        left: dict[int, int] = {}
        for table, count in tokens.items():
            self.require(table)
            end = table.length + count
            if count < 0 or end > self.context:
                raise SequenceError(
                    f"room for {count} tokens behind {table.length}: a sequence holds {self.context} at most;"
                    " end it, or make the cache with a larger context"
                )
            fresh[table] = max(0, self.pages_for(end) - len(table.pages))
            # Only the page of the first new token can be shared: a fork takes no page that holds none of its tokens.
            place = table.length // self.page_size
            if count and place < len(table.pages):
                page = table.pages[place]
                # A copy made in this very call leaves one sharer less, and the last of them writes in place.
                sharers = left.setdefault(page, self._counts.counts[page])
                if sharers > 1:
                    copied.append((table, place))
                    left[page] -= 1
        return fresh, copied

    def _release(self, pages: list[int]) -> None:
        freed = self._counts.release(pages)
        if self.debug:
            self._buffers.poison(freed)
        self._verify()

    def _verify(self) -> None:
        if self.debug:
            self.check()
