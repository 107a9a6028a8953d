"""The compile cache on disk: a front key (what was asked) points to a graph key (what was built).

Layout under the root::

    v1/front/<ab>/<front key>.json      graph key and the named components of the front key
    v1/graph/<ab>/<graph key>/          key.json, artifact/, dumps/, report.json
    .staging/                           entries being written, or replaced; published by one rename
    .bad/                               corrupt entries that were set aside

Readers take no lock. JSON, source text and safetensors only; who can write the root can run code in its readers.
"""

import hashlib
import json
import os
import re
import shutil
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from platformdirs import user_cache_path

from kimigraph.ir import env
from kimigraph.ir.errors import CorruptArtifactError
from kimigraph.ir.manifest import MANIFEST_NAME, verify_artifact

SCHEMA = "v1"
MODES = ("use", "off", "readonly", "refresh")
STALE_SECONDS = {".staging": 3600, ".bad": 7 * 24 * 3600}
"""Leftovers older than this are removed when something is stored."""


def digest(components: dict[str, Any]) -> str:
    """SHA-256 of the canonical JSON text of ``components``."""
    return hashlib.sha256(json.dumps(components, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def default_root() -> Path:
    """``KIMIGRAPH_CACHE_DIR`` or the user's cache directory."""
    return env.cache_directory() or user_cache_path("kimigraph")


@dataclass(frozen=True)
class Lookup:
    """The answer to a look-up: the entry's directory on a hit, else the reason of the miss."""

    entry: Path | None
    graph_key: str
    reason: str

    def report(self) -> dict[str, Any]:
        """The report of the original compilation (of a hit)."""
        assert self.entry is not None
        return json.loads((self.entry / "report.json").read_text(encoding="utf-8"))["report"]


@dataclass(frozen=True)
class Entry:
    """A finished compilation: the components of its graph key, where its files lie, and its report."""

    graph: dict[str, Any]
    artifact: Path
    dumps: Path
    report: dict[str, Any]


class CompileCache:
    """``mode``: ``use`` reads and writes, ``readonly`` reads, ``refresh`` writes, ``off`` does neither."""

    def __init__(self, root: Path | None = None, mode: str = "use") -> None:
        self.root = root or default_root()
        self.mode = mode
        self.warning = ""
        """Why the last entry was not kept; empty when it was."""

    @property
    def reads(self) -> bool:
        """Whether entries are looked up."""
        return self.mode in ("use", "readonly")

    @property
    def writes(self) -> bool:
        """Whether new entries are kept."""
        return self.mode in ("use", "refresh")

    def find_front(self, components: dict[str, Any]) -> Lookup:
        """The entry compiled for exactly this request."""
        if not self.reads:
            return Lookup(None, "", f"--cache {self.mode}")
        path = self._front_path(digest(components))
        try:
            graph_key = str(json.loads(path.read_bytes())["graph_key"])
        except (FileNotFoundError, NotADirectoryError):
            return Lookup(None, "", "not compiled before")
        except (OSError, ValueError, KeyError, TypeError) as error:
            return Lookup(None, "", f"corrupt entry: {path.name} cannot be read ({error})")
        return self.find_graph(graph_key)

    def find_graph(self, graph_key: str) -> Lookup:
        """The entry of a graph key, checked file by file; a corrupt one is set aside and reported as a miss."""
        if not self.reads:
            return Lookup(None, graph_key, f"--cache {self.mode}")
        if not re.fullmatch(r"[0-9a-f]{64}", graph_key):
            return Lookup(None, "", f"corrupt entry: {graph_key[:80]!r} is no key")
        entry = self._graph_path(graph_key)
        if not entry.is_dir():
            return Lookup(None, graph_key, "not compiled before")
        try:
            _check_entry(entry, graph_key)
        except (CorruptArtifactError, OSError, ValueError, KeyError, TypeError) as error:
            self.discard(graph_key)
            return Lookup(None, graph_key, f"corrupt entry{' set aside' if self.writes else ''}: {error}")
        return Lookup(entry, graph_key, "")

    def store(self, front: dict[str, Any] | None, entry: Entry) -> None:
        """Keep a finished compilation. A disk that refuses leaves the cache as it was and sets ``warning``."""
        self._write(lambda: self._publish(entry), front, digest(entry.graph))

    def store_front(self, front: dict[str, Any] | None, graph_key: str) -> None:
        """Let ``front`` point to an entry that is there already; otherwise as ``store``."""
        self._write(lambda: None, front, graph_key)

    def discard(self, graph_key: str) -> None:
        """Set an entry aside, so that it is found no more. A read-only cache keeps it and refuses it again."""
        if not self.writes:
            return
        bad = self.root / ".bad"
        try:
            bad.mkdir(parents=True, exist_ok=True)
            self._graph_path(graph_key).rename(bad / f"{graph_key}-{uuid.uuid4().hex}")
        except OSError:
            return

    def _write(self, publish: Any, front: dict[str, Any] | None, graph_key: str) -> None:
        self.warning = ""
        if not self.writes:
            return
        try:
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._sweep()
            publish()
            if front is not None:
                path = self._front_path(digest(front))
                path.parent.mkdir(parents=True, exist_ok=True)
                _write_json(path, {"graph_key": graph_key, "components": front})
        except OSError as error:
            self.warning = f"the compile cache at {self.root} cannot be written, so nothing was kept: {error}"

    def _publish(self, made: Entry) -> None:
        key = digest(made.graph)
        staged = self.root / ".staging" / f"{os.getpid()}-{uuid.uuid4().hex}"
        staged.mkdir(parents=True)
        try:
            shutil.copytree(made.artifact, staged / "artifact", ignore=shutil.ignore_patterns("__pycache__"))
            shutil.copytree(made.dumps, staged / "dumps")
            _write_json(staged / "key.json", made.graph)
            _write_json(staged / "report.json", {"manifest": _manifest_hash(staged), "report": made.report})
            _sync_tree(staged)
            entry = self._graph_path(key)
            entry.parent.mkdir(parents=True, exist_ok=True)
            if self.mode == "refresh" and entry.is_dir():
                entry.rename(staged.with_name(f"{staged.name}.replaced"))
            try:
                staged.rename(entry)
            except OSError:
                if not entry.is_dir():  # anything but "another process published it first"
                    raise
        finally:
            shutil.rmtree(staged, ignore_errors=True)
            shutil.rmtree(staged.with_name(f"{staged.name}.replaced"), ignore_errors=True)

    def _front_path(self, key: str) -> Path:
        return self.root / SCHEMA / "front" / key[:2] / f"{key}.json"

    def _graph_path(self, key: str) -> Path:
        return self.root / SCHEMA / "graph" / key[:2] / key

    def _sweep(self) -> None:
        for folder, seconds in STALE_SECONDS.items():
            for left in (self.root / folder).iterdir() if (self.root / folder).is_dir() else ():
                try:
                    if time.time() - left.stat().st_mtime > seconds:
                        shutil.rmtree(left, ignore_errors=True)
                except FileNotFoundError:
                    continue


def _check_entry(entry: Path, graph_key: str) -> None:
    """CorruptArtifactError unless the entry is whole: its key, its manifest and every file that the manifest lists."""
    if digest(json.loads((entry / "key.json").read_bytes())) != graph_key:
        raise CorruptArtifactError(f"{entry / 'key.json'} is the key of another entry")
    document = json.loads((entry / "report.json").read_bytes())
    if document["manifest"] != _manifest_hash(entry) or not isinstance(document["report"], dict):
        raise CorruptArtifactError(f"{entry / 'artifact' / MANIFEST_NAME} is not the one that was stored")
    verify_artifact(entry / "artifact")


def _manifest_hash(entry: Path) -> str:
    return hashlib.sha256((entry / "artifact" / MANIFEST_NAME).read_bytes()).hexdigest()


def _write_json(path: Path, document: dict[str, Any]) -> None:
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            json.dump(document, file, sort_keys=True, indent=1)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _sync_tree(root: Path) -> None:
    """Put all files below ``root`` on the disk, so that a rename cannot outlive its contents."""
    for path in root.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
