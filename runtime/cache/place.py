"""Where the cache lies, and whether that place can be trusted.

Layout under the root::

    v2/front/<ab>/<front key>.json    what was asked: its components, and the graph key that it led to
    v2/graph/<ab>/<graph key>/        what was built: an entry (see ``entries``)
    .staging/                         entries being written or thrown away; one rename publishes an entry
    .bad/                             corrupt entries that were set aside
    .locks/                           who compiles what at the moment

Who can write the root can run code in its readers: it belongs to this user (or root) and is closed to others.
"""

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from platformdirs import user_cache_path

from kimigraph.ir import env

SCHEMA = "v2"


def default_root() -> Path:
    """``KIMIGRAPH_CACHE_DIR`` or the user's cache directory."""
    return env.cache_directory() or user_cache_path("kimigraph")


@dataclass(frozen=True)
class Place:
    """The paths below a root."""

    root: Path

    @property
    def fronts(self) -> Path:
        """The folder of what was asked."""
        return self.root / SCHEMA / "front"

    @property
    def graphs(self) -> Path:
        """The folder of what was built."""
        return self.root / SCHEMA / "graph"

    @property
    def staging(self) -> Path:
        """The folder of what is being written or removed."""
        return self.root / ".staging"

    @property
    def bad(self) -> Path:
        """The folder of what was set aside."""
        return self.root / ".bad"

    @property
    def locks(self) -> Path:
        """The folder of locks."""
        return self.root / ".locks"

    def front(self, key: str) -> Path:
        """The file of a front key."""
        return self.fronts / key[:2] / f"{key}.json"

    def graph(self, key: str) -> Path:
        """The directory of a graph key."""
        return self.graphs / key[:2] / key

    def front_files(self) -> Iterator[Path]:
        """All files of front keys."""
        return (path for path in self.fronts.glob("??/*.json") if _is_key(path.stem))

    def entries(self) -> Iterator[Path]:
        """All entry directories."""
        return (path for path in self.graphs.glob("??/*") if _is_key(path.name) and path.is_dir())

    def foreign(self) -> list[str]:
        """What lies below the root and is nothing of the cache's."""
        known = {self.fronts, self.graphs, self.fronts.parent, self.staging, self.bad, self.locks}
        found = [path for path in self.root.glob("*") if path not in known and not path.name.startswith(".")]
        for folder in (self.fronts, self.graphs):
            ours = set(self.front_files()) | set(self.entries())
            found += [path for path in folder.glob("*/*") if path not in ours]
            found += [path for path in folder.glob("*") if not path.is_dir()]
        return sorted(path.relative_to(self.root).as_posix() for path in found)

    def distrust(self) -> str:
        """Why nothing below the root may be read or written; empty when all is well or nothing is there."""
        try:
            state = self.root.stat()
        except OSError:
            return ""
        if not stat.S_ISDIR(state.st_mode):
            return ""  # reading finds nothing there, writing says what is wrong
        if state.st_uid not in (os.geteuid(), 0):
            return (
                f"{self.root} belongs to user {state.st_uid}, and this is user {os.geteuid()}: choose another directory"
            )
        if state.st_mode & stat.S_IWOTH:
            return f"{self.root} can be written by everybody: chmod o-w it, or choose another directory"
        return ""


def _is_key(name: str) -> bool:
    return len(name) == 64 and all(letter in "0123456789abcdef" for letter in name)
