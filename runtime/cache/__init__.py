"""The compile cache: keys as documents, entries that check themselves, a disk that may fail at any moment."""

from kimigraph.runtime.cache.canonical import Components, canonical, differences, digest
from kimigraph.runtime.cache.entries import ARTIFACT, DUMPS, BadEntryError, Entry, StoredEntry
from kimigraph.runtime.cache.place import Place, default_root
from kimigraph.runtime.cache.store import LOCK_SECONDS, MODES, CompileCache, Lookup

__all__ = [
    "ARTIFACT",
    "DUMPS",
    "LOCK_SECONDS",
    "MODES",
    "BadEntryError",
    "CompileCache",
    "Components",
    "Entry",
    "Lookup",
    "Place",
    "StoredEntry",
    "canonical",
    "default_root",
    "differences",
    "digest",
]
