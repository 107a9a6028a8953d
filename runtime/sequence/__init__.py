"""Sequence state: pages of caches under one table a sequence, recurrent states as slots, and both as one object."""

from kimigraph.runtime.sequence.batch import BatchTables
from kimigraph.runtime.sequence.errors import PoolExhaustedError, SequenceError
from kimigraph.runtime.sequence.handle import SequenceHandle
from kimigraph.runtime.sequence.paged_cache import PagedCache, PageTable
from kimigraph.runtime.sequence.pool import SequencePool
from kimigraph.runtime.sequence.state_pool import StatePool, StateSlot

__all__ = [
    "BatchTables",
    "PageTable",
    "PagedCache",
    "PoolExhaustedError",
    "SequenceError",
    "SequenceHandle",
    "SequencePool",
    "StatePool",
    "StateSlot",
]
