"""Keeping the cache small: whole entries go, those unused for longest first."""

import os
import time
import uuid
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kimigraph.runtime.cache.disk import Disk
from kimigraph.runtime.cache.entries import ENTRY_NAME, BadEntryError, EntryRecord, unseal
from kimigraph.runtime.cache.locks import exclusive
from kimigraph.runtime.cache.place import Place

DEFAULT_LIMIT = 10 * 2**30
"""Bytes that the cache holds at most, unless ``KIMIGRAPH_CACHE_LIMIT`` says otherwise."""

STAMP_SECONDS = 3600
"""The stamp of an entry's last use is renewed this often at most."""

STALE_SECONDS = {".staging": 3600, ".bad": 7 * 24 * 3600, ".locks": 24 * 3600}
"""Leftovers older than this are removed when something is stored."""


@dataclass(frozen=True)
class Held:
    """An entry by its size and the time of its last use; one that cannot be read is of age without end."""

    path: Path
    size: int
    used: float


def stamp(entry: Path) -> None:
    """Note that an entry was used. The stamp is the time of ``entry.json``: access times mean nothing on many disks."""
    path = entry / ENTRY_NAME
    with suppress(OSError):
        if time.time() - path.stat().st_mtime > STAMP_SECONDS:
            os.utime(path)


def held_entries(place: Place) -> list[Held]:
    """All entries, the one unused for longest first."""
    return sorted((_held(path) for path in place.entries()), key=lambda entry: (entry.used, entry.path.name))


def prune(place: Place, disk: Disk, limit: int, spare: Collection[str] = ()) -> list[Held]:
    """Remove entries until those left take ``limit`` bytes at most; returns what went.

    ``spare`` holds graph keys that stay. One process prunes at a time; another one leaves it to that.
    """
    with exclusive(place.locks / "prune.lock", 0) as alone:
        if not alone:
            return []
        entries = held_entries(place)
        total = sum(entry.size for entry in entries)
        gone: list[Held] = []
        for entry in entries:
            if total <= limit:
                break
            if entry.path.name not in spare and discard_entry(place, disk, entry.path, place.staging):
                total -= entry.size
                gone.append(entry)
        if gone:
            drop_dangling_fronts(place, disk)
        return gone


def discard_entry(place: Place, disk: Disk, entry: Path, folder: Path) -> bool:
    """Take an entry out of sight by one rename into ``folder``; what lands in the staging folder is deleted, too."""
    target = folder / f"{entry.name}-{uuid.uuid4().hex}"
    try:
        disk.make_directory(folder)
        disk.rename(entry, target)
    except OSError:
        return False
    if folder == place.staging:
        disk.remove(target)
    return True


def drop_dangling_fronts(place: Place, disk: Disk) -> int:
    """Remove front keys whose entry is gone; returns how many."""
    count = 0
    for path in place.front_files():
        try:
            known = place.graph(str(unseal(path)["graph_key"])).is_dir()
        except (BadEntryError, KeyError):
            known = False
        if not known:
            disk.remove(path)
            count += 1
    return count


def sweep(place: Place, disk: Disk) -> None:
    """Remove what killed processes left, once it is old."""
    for name, seconds in STALE_SECONDS.items():
        folder = place.root / name
        for left in folder.iterdir() if folder.is_dir() else ():
            with suppress(OSError):
                if time.time() - left.stat().st_mtime > seconds:
                    disk.remove(left)


def _held(path: Path) -> Held:
    try:
        return Held(path, EntryRecord.read(path).size, (path / ENTRY_NAME).stat().st_mtime)
    except (BadEntryError, OSError):
        return Held(path, _size(path), 0.0)


def _size(path: Path) -> int:
    total = 0
    for file in path.rglob("*"):
        with suppress(OSError):
            total += file.stat().st_size
    return total
