"""Which pages are free, and how many tables name each of the others."""

from collections.abc import Iterable

from kimigraph.runtime.sequence.errors import PoolExhaustedError

SCRATCH_PAGE = 0
"""The page that padded rows of a batch read and write; no sequence ever has it."""


class PageCounts:
    """Reference counts of pages 1 to ``total``."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.counts = [0] * (total + 1)
        self.free = list(range(total, 0, -1))
        """The free pages; the last is the next to be taken."""

    def next_free(self, wanted: int) -> list[int]:
        """The pages that ``take`` would give, in order; PoolExhaustedError when there are not so many."""
        if wanted > len(self.free):
            raise PoolExhaustedError("page", wanted, len(self.free), self.total, "PagedCache(pages=...)")
        return self.free[len(self.free) - wanted :][::-1]

    def take(self, wanted: int) -> list[int]:
        """Take ``wanted`` free pages, each then named once."""
        pages = self.next_free(wanted)
        del self.free[len(self.free) - wanted :]
        for page in pages:
            self.counts[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """One table more names each of ``pages``."""
        for page in pages:
            self.counts[page] += 1

    def release(self, pages: Iterable[int]) -> list[int]:
        """One table less names each of ``pages``; returns those that no table names any more, which are free now."""
        freed: list[int] = []
        for page in pages:
            self.counts[page] -= 1
            if self.counts[page] == 0:
                freed.append(page)
        self.free += reversed(freed)
        return freed
