"""Entries: a finished compilation as files with their SHA-256, on the disk or in memory.

An entry directory holds ``entry.json`` (the list of all other files, and a title for people), ``key.json`` (the
components of the graph key), ``report.json``, ``artifact/`` and ``dumps/``. Files that the list does not name are never
read.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from kimigraph.runtime.cache.canonical import Components, canonical, digest

ENTRY_NAME, KEY_NAME, REPORT_NAME = "entry.json", "key.json", "report.json"
ARTIFACT, DUMPS = "artifact/", "dumps/"


class BadEntryError(Exception):
    """An entry that is not what was stored; the text says what is wrong."""


@dataclass(frozen=True)
class Entry:
    """A finished compilation on its way into the cache.

    ``graph`` are the components of its graph key, ``artifact`` and ``dumps`` the directories that hold its files
    (``dumps`` may be missing), ``title`` a few words for listings (model, shape, target).
    """

    graph: Components
    artifact: Path
    dumps: Path
    report: dict[str, Any]
    title: dict[str, str] = field(default_factory=lambda: {})

    def files(self) -> dict[str, bytes]:
        """All files of the entry by path, ``entry.json`` last."""
        found = {KEY_NAME: _text(self.graph), REPORT_NAME: _text(self.report)}
        for prefix, directory in ((ARTIFACT, self.artifact), (DUMPS, self.dumps)):
            for path in sorted(directory.rglob("*")) if directory.is_dir() else ():
                relative = path.relative_to(directory)
                if path.is_file() and "__pycache__" not in relative.parts:
                    found[prefix + relative.as_posix()] = path.read_bytes()
        records = [_record(name, content) for name, content in found.items()]
        body = {
            "graph_key": digest(self.graph),
            "title": self.title,
            "size": sum(record["size"] for record in records),
            "files": records,
        }
        return {**found, ENTRY_NAME: seal(body)}


@dataclass(frozen=True)
class StoredEntry:
    """An entry that was found whole. ``files`` holds its bytes, those of the dumps only if they were asked for."""

    graph_key: str
    files: Mapping[str, bytes]

    @property
    def components(self) -> Components:
        """The components of its graph key."""
        return json.loads(self.files[KEY_NAME])

    @property
    def dumped(self) -> bool:
        """Whether dumps are among the bytes."""
        return has_dumps(self.files)

    @property
    def report(self) -> dict[str, Any]:
        """The report of the original compilation."""
        return json.loads(self.files[REPORT_NAME])

    def restore(self, prefix: str, directory: Path) -> list[str]:
        """Write the files below ``prefix`` (``ARTIFACT`` or ``DUMPS``) into ``directory``; their paths there."""
        written: list[str] = []
        for name in sorted(name for name in self.files if name.startswith(prefix)):
            path = directory / name.removeprefix(prefix)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(self.files[name])
            written.append(name.removeprefix(prefix))
        return written


@dataclass(frozen=True)
class EntryRecord:
    """``entry.json`` of an entry: what it should hold."""

    graph_key: str
    title: dict[str, str]
    size: int
    files: tuple[tuple[str, int, str], ...]

    @classmethod
    def read(cls, directory: Path) -> "EntryRecord":
        """The record of an entry directory. BadEntryError when it is missing or was changed."""
        body = unseal(directory / ENTRY_NAME)
        try:
            files = tuple((str(f["path"]), int(f["size"]), str(f["sha256"])) for f in body["files"])
            record = cls(str(body["graph_key"]), dict(body["title"]), int(body["size"]), files)
        except (KeyError, TypeError, ValueError) as error:
            raise BadEntryError(f"{ENTRY_NAME} has another form ({error!r})") from None
        if any(PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts for name, _, _ in files):
            raise BadEntryError(f"{ENTRY_NAME} names a file outside the entry")
        return record


def load_entry(directory: Path, graph_key: str, dumps: bool) -> StoredEntry:
    """Read an entry and check every byte that is used. BadEntryError says what is missing or was changed."""
    record = EntryRecord.read(directory)
    if record.graph_key != graph_key:
        raise BadEntryError(f"{ENTRY_NAME} is that of another entry")
    files: dict[str, bytes] = {}
    for name, size, sha256 in record.files:
        if dumps or not name.startswith(DUMPS):
            files[name] = _checked(directory / name, name, size, sha256)
    entry = StoredEntry(graph_key, files)
    try:
        named = digest(entry.components)
    except (KeyError, ValueError) as error:
        raise BadEntryError(f"{KEY_NAME} cannot be read ({error!r})") from None
    if named != graph_key:
        raise BadEntryError(f"{KEY_NAME} is the key of another entry")
    return entry


def has_dumps(names: Iterable[str]) -> bool:
    """Whether the files of an entry by these names have dumps among them."""
    return any(name.startswith(DUMPS) for name in names)


def seal(body: dict[str, Any]) -> bytes:
    """A JSON document that carries its own SHA-256."""
    document = {"sha256": hashlib.sha256(canonical(body).encode()).hexdigest(), "body": body}
    return (json.dumps(document, sort_keys=True, indent=1) + "\n").encode()


def unseal(path: Path) -> dict[str, Any]:
    """The body of a document that ``seal`` made. BadEntryError when it is missing, cut short or was changed."""
    try:
        document: Any = json.loads(path.read_bytes())
        body = document["body"]
        whole = document["sha256"] == hashlib.sha256(canonical(body).encode()).hexdigest()
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise BadEntryError(f"{path.name} cannot be read ({type(error).__name__}: {error})") from None
    if not whole or not isinstance(body, dict):
        raise BadEntryError(f"{path.name} was changed")
    return body


def foreign_files(directory: Path, record: EntryRecord) -> list[str]:
    """Files of an entry directory that its record does not name."""
    known = {ENTRY_NAME, *(name for name, _, _ in record.files)}
    found = (path.relative_to(directory).as_posix() for path in sorted(directory.rglob("*")) if not path.is_dir())
    return [name for name in found if name not in known]


def _checked(path: Path, name: str, size: int, sha256: str) -> bytes:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise BadEntryError(f"{name} is missing or unreadable ({error.strerror})") from None
    if len(content) != size:
        raise BadEntryError(f"{name} has {len(content)} bytes instead of {size}")
    if hashlib.sha256(content).hexdigest() != sha256:
        raise BadEntryError(f"{name} was changed: its SHA-256 is not the recorded one")
    return content


def _record(name: str, content: bytes) -> dict[str, Any]:
    return {"path": name, "size": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def _text(document: Any) -> bytes:
    return (json.dumps(document, sort_keys=True, indent=1) + "\n").encode()
