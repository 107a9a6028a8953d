"""What names a sequence in both pools."""

from dataclasses import dataclass

from kimigraph.runtime.sequence.paged_cache import PageTable
from kimigraph.runtime.sequence.state_pool import StateSlot


@dataclass(frozen=True, eq=False)
class SequenceHandle:
    """One sequence: its pages and its states. Two handles are equal only when they are the same sequence."""

    table: PageTable
    slot: StateSlot

    @property
    def length(self) -> int:
        """Tokens that are there."""
        return self.table.length
