"""All that the cache does to the disk, one call a step, so that a test can stop a process at every boundary."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

Boundary = Callable[[str], None]


def _pass(_: str) -> None:
    """Goes on."""


class Disk:
    """Writes that survive a crash: a file is complete on the disk before anything names it.

    ``boundary`` is called with the name of each step before it and after it.
    """

    def __init__(self, boundary: Boundary = _pass) -> None:
        self._boundary = boundary

    def make_directory(self, path: Path, mode: int = 0o777) -> None:
        """Make ``path`` and its parents where they are missing."""
        self._boundary("mkdir")
        path.mkdir(mode=mode, parents=True, exist_ok=True)
        self._boundary("mkdir done")

    def write(self, path: Path, content: bytes) -> None:
        """Write a new file and put it on the disk."""
        self._boundary("write")
        with path.open("xb") as file:
            half = len(content) // 2
            file.write(content[:half])
            file.flush()
            self._boundary("write half")
            file.write(content[half:])
            file.flush()
            self._boundary("fsync")
            os.fsync(file.fileno())
        self._boundary("fsync done")

    def sync_directory(self, path: Path) -> None:
        """Put the names in a directory on the disk."""
        self._boundary("fsync directory")
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
        self._boundary("fsync directory done")

    def rename(self, old: Path, new: Path) -> None:
        """Give ``old`` another name. OSError where a directory that holds something has it."""
        self._boundary("rename")
        old.rename(new)
        self._boundary("rename done")

    def replace(self, old: Path, new: Path) -> None:
        """Give a file another name, whatever had it before."""
        self._boundary("replace")
        old.replace(new)
        self._boundary("replace done")

    def remove(self, path: Path) -> None:
        """Remove a directory or a file; what cannot be removed stays."""
        self._boundary("remove")
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            try:
                path.unlink(missing_ok=True)
            except OSError:
                return
        self._boundary("remove done")
