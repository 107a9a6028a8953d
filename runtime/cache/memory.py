"""Where entries go that the disk refuses: they serve this process."""

from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from kimigraph.runtime.cache.entries import StoredEntry


@dataclass
class Overflow:
    """Entries by graph key, and graph keys by front key, that a root could not take; ``warned`` once it was said."""

    entries: dict[str, StoredEntry] = field(default_factory=lambda: {})
    fronts: dict[str, str] = field(default_factory=lambda: {})
    warned: bool = False

    MOST = 16

    def keep(self, front_key: str | None, entry: StoredEntry) -> None:
        """Hold an entry; the oldest goes when there are too many."""
        while len(self.entries) >= self.MOST:
            del self.entries[next(iter(self.entries))]
        self.entries[entry.graph_key] = entry
        if front_key is not None:
            self.fronts[front_key] = entry.graph_key


@cache
def overflow_of(root: Path) -> Overflow:
    """The overflow of a root in this process."""
    del root
    return Overflow()
