"""The compile cache on disk: a front key (what was asked) points to a graph key (what was built).

Layout under the root::

    v1/front/<ab>/<front key>.json      graph key and the named components of the front key
    v1/graph/<ab>/<graph key>/          key.json, artifact/, dumps/, report.json
    .staging/                           entries being written; published by one rename

Readers take no lock. JSON, source text and safetensors only.
"""

import hashlib
import json
import os
import shutil
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from platformdirs import user_cache_path

from kimigraph.ir import env
from kimigraph.ir.errors import CorruptArtifactError
from kimigraph.ir.manifest import Manifest

SCHEMA = "v1"
STALE_STAGING_SECONDS = 3600


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


class CompileCache:
    """``mode``: ``use`` reads and writes, ``readonly`` reads, ``refresh`` writes, ``off`` does neither."""

    def __init__(self, root: Path | None = None, mode: str = "use") -> None:
        self.root = root or default_root()
        self.mode = mode
        self.warning = ""

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
            graph_key = str(json.loads(path.read_text(encoding="utf-8"))["graph_key"])
        except FileNotFoundError:
            return Lookup(None, "", "not compiled before")
        except (OSError, ValueError, KeyError) as error:
            return Lookup(None, "", f"unreadable front entry: {error}")
        return self.find_graph(graph_key)

    def find_graph(self, graph_key: str) -> Lookup:
        """The entry of a graph key, checked file by file; a corrupt one is set aside and reported as a miss."""
        if not self.reads:
            return Lookup(None, graph_key, f"--cache {self.mode}")
        entry = self._graph_path(graph_key)
        if not entry.is_dir():
            return Lookup(None, graph_key, "not compiled before")
        try:
            Manifest.read(entry / "artifact").verify_files(entry / "artifact")
            json.loads((entry / "report.json").read_text(encoding="utf-8"))
        except (CorruptArtifactError, OSError, ValueError) as error:
            self._quarantine(entry)
            return Lookup(None, graph_key, f"corrupt entry set aside: {error}")
        return Lookup(entry, graph_key, "")

    def store(self, front: dict[str, Any] | None, graph: dict[str, Any], artifact: Path, dumps: Path | None, report: dict[str, Any]) -> None:
        """Keep a finished compilation. A disk that refuses leaves the cache as it was and sets ``warning``."""
        if not self.writes:
            return
        try:
            self._publish(front, graph, artifact, dumps, report)
        except OSError as error:
            self.warning = f"the compile cache at {self.root} was not written: {error}"

    def _publish(self, front: dict[str, Any] | None, graph: dict[str, Any], artifact: Path, dumps: Path | None, report: dict[str, Any]) -> None:
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._sweep_staging()
        key = digest(graph)
        staged = self.root / ".staging" / f"{os.getpid()}-{uuid.uuid4().hex}"
        staged.mkdir(parents=True)
        try:
            shutil.copytree(artifact, staged / "artifact", ignore=shutil.ignore_patterns("__pycache__", "dumps"))
            if dumps is not None:
                shutil.copytree(dumps, staged / "dumps")
            _write_json(staged / "key.json", graph)
            _write_json(staged / "report.json", report)
            entry = self._graph_path(key)
            entry.parent.mkdir(parents=True, exist_ok=True)
            if self.mode == "refresh" and entry.is_dir():
                self._quarantine(entry)
            try:
                staged.rename(entry)
            except OSError:
                if not entry.is_dir():  # anything but "another process published it first"
                    raise
        finally:
            shutil.rmtree(staged, ignore_errors=True)
        if front is not None:
            path = self._front_path(digest(front))
            path.parent.mkdir(parents=True, exist_ok=True)
            _write_json(path, {"graph_key": key, "components": front})

    def _front_path(self, key: str) -> Path:
        return self.root / SCHEMA / "front" / key[:2] / f"{key}.json"

    def _graph_path(self, key: str) -> Path:
        return self.root / SCHEMA / "graph" / key[:2] / key

    def _quarantine(self, entry: Path) -> None:
        bad = self.root / ".bad"
        try:
            bad.mkdir(parents=True, exist_ok=True)
            entry.rename(bad / f"{entry.name}-{uuid.uuid4().hex}")
        except OSError:
            pass  # a read-only cache: the entry stays and is refused again next time

    def _sweep_staging(self) -> None:
        staging = self.root / ".staging"
        for left in staging.iterdir() if staging.is_dir() else ():
            try:
                if time.time() - left.stat().st_mtime > STALE_STAGING_SECONDS:
                    shutil.rmtree(left, ignore_errors=True)
            except FileNotFoundError:
                continue


def _write_json(path: Path, document: dict[str, Any]) -> None:
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    with temporary.open("w", encoding="utf-8") as file:
        json.dump(document, file, sort_keys=True, indent=1)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
