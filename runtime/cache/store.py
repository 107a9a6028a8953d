"""The compile cache: a front key (what was asked) points to a graph key (what was built).

Readers take no lock. JSON, source text, cubins and safetensors only; nothing of it is unpickled, and of what it holds
only generated kernel source whose SHA-256 is recorded is ever run.
"""

import os
import re
import uuid
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kimigraph.ir import env
from kimigraph.ir.errors import CorruptArtifactError
from kimigraph.runtime.cache.canonical import Components, digest
from kimigraph.runtime.cache.disk import Disk
from kimigraph.runtime.cache.entries import (
    DUMPS,
    ENTRY_NAME,
    REPORT_NAME,
    BadEntryError,
    Entry,
    EntryRecord,
    StoredEntry,
    has_dumps,
    load_entry,
    seal,
    unseal,
)
from kimigraph.runtime.cache.eviction import DEFAULT_LIMIT, discard_entry, prune, stamp, sweep
from kimigraph.runtime.cache.explain import nearest
from kimigraph.runtime.cache.locks import exclusive
from kimigraph.runtime.cache.memory import overflow_of
from kimigraph.runtime.cache.place import Place, default_root

MODES = ("use", "off", "readonly", "refresh", "check")
LOCK_SECONDS = 1800
"""How long one process waits for another that compiles the same; then it compiles, too."""


@dataclass(frozen=True)
class Lookup:
    """The answer to a look-up: the entry on a hit, else the reason of the miss. ``note`` adds to a hit."""

    entry: StoredEntry | None
    graph_key: str
    reason: str
    note: str = ""


class CompileCache:
    """``mode``: ``use`` reads and writes, ``readonly`` reads, ``refresh`` writes, ``off`` does neither.

    ``check`` finds nothing, so that all is compiled again, and holds what is then stored against what was: an entry
    that differs is a fault of the compiler or of its keys.
    """

    def __init__(self, root: Path | None = None, mode: str = "use", disk: Disk | None = None) -> None:
        self.place = Place(root or default_root())
        self.disk = disk or Disk()
        self.mode = mode
        self.distrust = self.place.distrust() if mode != "off" else ""
        """Why the root is left alone; empty when it is not."""
        self.note = ""
        """What a check found."""
        self.warning = ""
        """Why the last entry is in memory alone, said once in a process; empty when it is not, or was said."""

    @property
    def reads(self) -> bool:
        """Whether entries are looked up."""
        return self.mode in ("use", "readonly")

    @property
    def writes(self) -> bool:
        """Whether new entries are kept."""
        return self.mode in ("use", "refresh", "check")

    @property
    def status(self) -> str:
        """What a compilation without a hit reports: ``off``, ``bypass`` or ``miss``."""
        fixed = {"off": "off", "refresh": "bypass", "check": "bypass"}
        return fixed.get(self.mode, "bypass" if self.distrust else "miss")

    def find_front(self, components: Components, dumps: bool = False) -> Lookup:
        """The entry compiled for exactly this request; with ``dumps`` one that has dumps, and these too."""
        if not self.reads:
            return Lookup(None, "", f"--cache {self.mode}")
        key = digest(components)
        held = overflow_of(self.place.root).fronts.get(key)
        if held is not None:
            return self.find_graph(held, dumps)
        if self.distrust:
            return Lookup(None, "", self.distrust)
        path = self.place.front(key)
        try:
            if not os.path.exists(path):
                return Lookup(None, "", self._why(components))
            graph_key = str(unseal(path)["graph_key"])
        except (BadEntryError, OSError, KeyError) as error:
            return Lookup(None, "", f"corrupt entry: {error}")
        found = self.find_graph(graph_key, dumps)
        gone = found.entry is None and found.reason == _UNKNOWN
        return Lookup(None, "", "the entry was evicted") if gone else found

    def find_graph(self, graph_key: str, dumps: bool = False) -> Lookup:
        """The entry of a graph key, checked byte by byte; a corrupt one is set aside and reported as a miss.

        An entry that was compiled without dumps is a miss where ``dumps`` are asked for.
        """
        if not self.reads:
            return Lookup(None, graph_key, f"--cache {self.mode}")
        held = overflow_of(self.place.root).entries.get(graph_key)
        if held is not None:
            lacking = dumps and not held.dumped
            return Lookup(None, graph_key, _DUMPLESS) if lacking else Lookup(held, graph_key, "", "held in memory")
        if self.distrust:
            return Lookup(None, graph_key, self.distrust)
        if not re.fullmatch(r"[0-9a-f]{64}", graph_key):
            return Lookup(None, "", f"corrupt entry: {graph_key[:80]!r} is no key")
        directory = self.place.graph(graph_key)
        if not os.path.isdir(directory):  # unlike Path.is_dir, never an error
            return Lookup(None, graph_key, _UNKNOWN)
        try:
            entry = load_entry(directory, graph_key, dumps)
        except BadEntryError as error:
            if not os.path.isdir(directory):  # evicted while it was read
                return Lookup(None, graph_key, _UNKNOWN)
            aside = self.discard(graph_key)
            return Lookup(None, graph_key, f"corrupt entry{' set aside' if aside else ''}: {error}")
        if dumps and not entry.dumped:
            return Lookup(None, graph_key, _DUMPLESS)
        if self.writes:
            stamp(directory)
        return Lookup(entry, graph_key, "")

    def store(self, front: Components | None, entry: Entry) -> None:
        """Keep a finished compilation. Where the disk refuses, memory holds it, and ``warning`` says so once.

        Under ``check``, an entry that is there already is compared; DifferentEntryError names the files that differ.
        """
        self.warning = ""
        if not self.writes:
            return
        key = digest(entry.graph)
        if self.mode == "check":
            equal = self._is_equal(key, entry)
            self.note = "equal to the stored entry" if equal else "there was none to compare with"
            if equal:
                return
        if self.distrust:
            self._hold(front, StoredEntry(key, entry.files()), self.distrust)
            return
        files: dict[str, bytes] = {}
        try:
            files = entry.files()
            self._prepare_root()
            self._publish(key, files)
            self._point(front, key)
            prune(self.place, self.disk, env.cache_limit() or DEFAULT_LIMIT, (key,))
        except OSError as error:
            reason = f"the compile cache at {self.place.root} cannot be written: {error}"
            self._hold(front, StoredEntry(key, files), reason)

    def store_front(self, front: Components | None, graph_key: str) -> None:
        """Let ``front`` point to an entry that is there already."""
        self.warning = ""
        if not self.writes or front is None:
            return
        overflow = overflow_of(self.place.root)
        if graph_key in overflow.entries:
            overflow.fronts[digest(front)] = graph_key
        elif not self.distrust:
            try:
                self._point(front, graph_key)
            except OSError as error:
                self.warning = (
                    "" if overflow.warned else f"the compile cache at {self.place.root} cannot be written: {error}"
                )
                overflow.warned = True

    def discard(self, graph_key: str) -> bool:
        """Set an entry aside, so that it is found no more. A read-only cache keeps it and refuses it again."""
        overflow_of(self.place.root).entries.pop(graph_key, None)
        if not self.writes or self.distrust:
            return False
        return discard_entry(self.place, self.disk, self.place.graph(graph_key), self.place.bad)

    @contextmanager
    def compiling(self, key: str, notify: Callable[[str], None]) -> Generator[bool]:
        """Be the only process that compiles ``key`` during the block.

        The value says whether the lock is held: the caller then looks the key up once more, as another process may have
        finished it just before. One that waited too long, or a cache that knows no locks, goes on without.
        """
        if self.mode != "use" or self.distrust:
            yield False
            return
        lock = self.place.locks / f"{key}.lock"
        with exclusive(
            lock, LOCK_SECONDS, lambda: notify("waiting for another process that compiles the same")
        ) as held:
            yield held

    def _is_equal(self, key: str, entry: Entry) -> bool:
        """Whether an entry is stored and equal to ``entry``, file by file but for what holds times."""
        cache = CompileCache(self.place.root, "readonly")
        known = cache.find_graph(key, dumps=True).entry or cache.find_graph(key).entry
        if known is None:
            return False
        files = entry.files()
        with_dumps = known.dumped and has_dumps(files)
        stored, fresh = (comparable(each, with_dumps) for each in (known.files, files))
        different = sorted(name for name in {*stored, *fresh} if stored.get(name) != fresh.get(name))
        if different:
            shown = ", ".join(different[:5]) + (f" and {len(different) - 5} more" if len(different) > 5 else "")
            raise DifferentEntryError(
                f"compiled again, entry {key[:12]} of the compile cache has other bytes in {shown}: the compiler is "
                "not deterministic, or its key leaves something out; please report it, with both versions of the files "
                f"({self.place.graph(key)} has the stored ones)"
            )
        return True

    def _why(self, components: Components) -> str:
        """Why a request misses: what it differs in from the nearest one that was stored."""
        found = nearest(self.place, components)
        return found.sentence() if found is not None else _UNKNOWN

    def _prepare_root(self) -> None:
        if not self.place.root.is_dir():
            self.disk.make_directory(self.place.root, 0o700)
        self.disk.make_directory(self.place.staging)
        sweep(self.place, self.disk)

    def _publish(self, key: str, files: dict[str, bytes]) -> None:
        """Write an entry beside its place and rename it there; the first of two writers wins, unless this refreshes or
        has dumps that the first has not."""
        entry, staged = self.place.graph(key), self._staged()
        replaced = staged.with_name(f"{staged.name}.replaced")
        try:
            self.disk.make_directory(staged)
            folders = {staged}
            for name, content in files.items():
                path = staged / name
                if path.parent not in folders:
                    self.disk.make_directory(path.parent)
                    folders.add(path.parent)
                self.disk.write(path, content)
            for folder in sorted(folders, reverse=True):
                self.disk.sync_directory(folder)
            self.disk.make_directory(entry.parent)
            if entry.is_dir() and (self.mode == "refresh" or (has_dumps(files) and not self._has_dumps(key))):
                self.disk.rename(entry, replaced)
            try:
                self.disk.rename(staged, entry)
                self.disk.sync_directory(entry.parent)
            except OSError:
                if not entry.is_dir():  # anything but "another process published it first"
                    raise
        finally:
            for left in (staged, replaced):
                if left.exists():
                    self.disk.remove(left)

    def _has_dumps(self, key: str) -> bool:
        """Whether the entry of a key has dumps; one that is corrupt or gone has none."""
        try:
            return has_dumps(name for name, _, _ in EntryRecord.read(self.place.graph(key)).files)
        except BadEntryError:
            return False

    def _point(self, front: Components | None, graph_key: str) -> None:
        if front is None:
            return
        path, staged = self.place.front(digest(front)), self._staged()
        self.disk.make_directory(path.parent)
        self.disk.make_directory(staged.parent)
        try:
            self.disk.write(staged, seal({"graph_key": graph_key, "components": front}))
            self.disk.replace(staged, path)
            self.disk.sync_directory(path.parent)
        finally:
            if staged.exists():
                self.disk.remove(staged)

    def _staged(self) -> Path:
        return self.place.staging / f"{os.getpid()}-{uuid.uuid4().hex}"

    def _hold(self, front: Components | None, entry: StoredEntry, reason: str) -> None:
        overflow = overflow_of(self.place.root)
        known = overflow.entries.get(entry.graph_key)
        if known is not None and known.dumped and not entry.dumped:
            entry = known
        if entry.files:
            overflow.keep(None if front is None else digest(front), entry)
        if not overflow.warned:
            self.warning = f"{reason}; what is compiled is kept in memory, for this process"
            overflow.warned = True


_UNKNOWN = "not compiled before"
_DUMPLESS = "the entry has no dumps: it was compiled where nobody read them"


class DifferentEntryError(CorruptArtifactError):
    """A compilation that is not what the cache holds for the same key."""


def comparable(files: Mapping[str, bytes], with_dumps: bool = True) -> dict[str, bytes]:
    """The files of an entry that two compilations share: not its report and its record, nor timings among the dumps;
    no dumps at all unless both have some (``with_dumps``)."""
    timed = (ENTRY_NAME, REPORT_NAME, f"{DUMPS}timings.json")
    names = (name for name in files if name not in timed and (with_dumps or not name.startswith(DUMPS)))
    return {name: files[name] for name in names}
