"""Directories that a command writes: made beside their final name, then renamed, so that an old one stays whole."""

import shutil
import uuid
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from kimigraph.ir.errors import UsageError


def check_replaceable(directory: Path) -> None:
    """Refuse a directory that holds something other than an artifact of an earlier run."""
    if directory.exists() and not directory.is_dir():
        raise UsageError(f"{directory} is a file: choose another --out")
    if directory.is_dir() and any(directory.iterdir()) and not (directory / "manifest.json").exists():
        raise UsageError(f"{directory} holds files that are no artifact: choose another --out, or empty it yourself")


@contextmanager
def staged_directory(final: Path) -> Generator[Path]:
    """An empty directory that takes the place of ``final`` when the block ends well, and vanishes when it does not."""
    check_replaceable(final)
    final.parent.mkdir(parents=True, exist_ok=True)
    staged = final.parent / f".{final.name}.{uuid.uuid4().hex[:8]}"
    staged.mkdir()
    try:
        yield staged
        replaced = staged.with_name(staged.name + ".old")
        if final.exists():
            final.rename(replaced)
        staged.rename(final)
        shutil.rmtree(replaced, ignore_errors=True)
    finally:
        shutil.rmtree(staged, ignore_errors=True)
