"""What is in the cache, for people: plain JSON documents, made without reading more than they show."""

import json
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from kimigraph.ir.errors import UsageError
from kimigraph.runtime.cache.disk import Disk
from kimigraph.runtime.cache.entries import (
    KEY_NAME,
    REPORT_NAME,
    BadEntryError,
    EntryRecord,
    foreign_files,
    load_entry,
    unseal,
)
from kimigraph.runtime.cache.eviction import Held, held_entries, prune
from kimigraph.runtime.cache.explain import stored_fronts
from kimigraph.runtime.cache.place import Place


def list_entries(place: Place) -> list[dict[str, Any]]:
    """All entries, the one used last first: key, title, bytes, and when it was used (seconds since 1970)."""
    found: list[dict[str, Any]] = []
    for held in reversed(held_entries(place)):
        title: dict[str, str] = {}
        with suppress(BadEntryError):
            title = EntryRecord.read(held.path).title
        found.append(
            {"key": held.path.name, **title, "size": held.size, "last_used": held.used, "readable": bool(title)}
        )
    return found


def show_entry(place: Place, prefix: str) -> dict[str, Any]:
    """An entry by the beginning of its key: components, files, report. UsageError unless there is exactly one."""
    keys = [path.name for path in place.entries() if path.name.startswith(prefix)]
    if len(keys) != 1:
        what = "no entry has" if not keys else f"{len(keys)} entries have"
        raise UsageError(f"{what} a key that begins with {prefix!r}: `kimigraph cache list` shows the keys")
    directory = place.graph(keys[0])
    try:
        record = EntryRecord.read(directory)
        components, report = (json.loads((directory / name).read_bytes()) for name in (KEY_NAME, REPORT_NAME))
    except (BadEntryError, OSError, ValueError) as error:
        raise UsageError(f"entry {keys[0]} is corrupt ({error}): `kimigraph cache verify` sets it aside") from None
    return {
        "key": keys[0],
        "directory": str(directory),
        **record.title,
        "size": record.size,
        "components": components,
        "asked_as": [key for key, body in stored_fronts(place) if body["graph_key"] == keys[0]],
        "files": [{"path": name, "size": size, "sha256": sha256} for name, size, sha256 in record.files],
        "timing": report.get("timing", {}),
        "launches": report.get("launches", {}),
    }


def verify_entries(place: Place) -> dict[str, Any]:
    """Read every byte of every entry: how many were checked, which are corrupt and why, and what is not the cache's."""
    corrupt: list[dict[str, str]] = []
    foreign, checked = place.foreign(), 0
    for directory in sorted(place.entries()):
        checked += 1
        try:
            load_entry(directory, directory.name, dumps=True)
            names = foreign_files(directory, EntryRecord.read(directory))
            foreign += [f"{directory.relative_to(place.root).as_posix()}/{name}" for name in names]
        except BadEntryError as error:
            corrupt.append({"key": directory.name, "reason": str(error)})
    for path in sorted(place.front_files()):
        try:
            unseal(path)
        except BadEntryError as error:
            corrupt.append({"key": path.stem, "reason": str(error)})
    return {"root": str(place.root), "checked": checked, "corrupt": corrupt, "foreign": sorted(foreign)}


def prune_entries(place: Place, limit: int) -> dict[str, Any]:
    """Remove the entries unused for longest until the rest takes ``limit`` bytes at most."""
    gone: Sequence[Held] = prune(place, Disk(), limit)
    left = held_entries(place)
    return {
        "removed": [entry.path.name for entry in gone],
        "freed": sum(entry.size for entry in gone),
        "entries": len(left),
        "size": sum(entry.size for entry in left),
        "limit": limit,
    }


def clear_cache(place: Place) -> dict[str, Any]:
    """Remove all that the cache wrote; files of others stay."""
    entries = held_entries(place)
    disk = Disk()
    for folder in (place.fronts.parent, place.staging, place.bad, place.locks):
        disk.remove(folder)
    return {"removed": len(entries), "freed": sum(entry.size for entry in entries)}
