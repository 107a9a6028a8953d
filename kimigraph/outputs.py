"""Directories that a command writes: made beside their final name, then renamed, so that an old one stays whole."""

import json
import shutil
import uuid
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kimigraph.ir.errors import UsageError
from kimigraph.ir.manifest import MANIFEST_NAME
from kimigraph.ir.trace import FILE as SCHEDULE_NAME
from kimigraph.report import REPORT_NAME
from kimigraph.tools.publish import DOCUMENT_NAME, REMARKS_NAME


def check_replaceable(directory: Path) -> None:
    """Refuse a path that is, or a directory that holds, something other than an artifact of an earlier run."""
    if not directory.exists():
        return
    if not directory.is_dir():
        raise UsageError(f"{directory} is a file: choose another --out")
    foreign = _foreign_files(directory)
    if foreign:
        shown = ", ".join(foreign[:3]) + (", ..." if len(foreign) > 3 else "")
        raise UsageError(
            f"{directory} holds files that are no part of an artifact ({shown}): choose another --out, "
            "or empty it yourself"
        )


def _foreign_files(directory: Path) -> list[str]:
    """Files that no compilation wrote, by path; a manifest that is no artifact's makes all of them foreign."""
    found = (path.relative_to(directory) for path in sorted(directory.rglob("*")) if not path.is_dir())
    ours = _recorded_files(directory / MANIFEST_NAME)
    return [str(path) for path in found if path.as_posix() not in ours and "__pycache__" not in path.parts]


def _recorded_files(manifest: Path) -> set[str]:
    """The files of an artifact by its manifest, and those that come beside them; none without such a manifest."""
    try:
        document: Any = json.loads(manifest.read_bytes())
        assert document["schema_version"] and document["target"]
        beside = {MANIFEST_NAME, REPORT_NAME, DOCUMENT_NAME, REMARKS_NAME, SCHEDULE_NAME}
        return beside.union(record["path"] for record in document["files"])
    except (OSError, ValueError, KeyError, TypeError, AssertionError):
        return set()


@contextmanager
def staged_directory(final: Path) -> Generator[Path]:
    """An empty directory that takes the place of ``final`` when the block ends well, and vanishes when it does not.

    On any exception, KeyboardInterrupt included, what was at ``final`` is there as before.
    """
    check_replaceable(final)
    final = final.resolve()  # a link keeps pointing where it points
    final.parent.mkdir(parents=True, exist_ok=True)
    staged = final.parent / f".{uuid.uuid4().hex[:12]}.kimigraph"
    replaced = staged.with_suffix(".old")
    staged.mkdir()
    try:
        yield staged
        check_replaceable(final)  # the block takes long enough for other files to appear
        if final.exists():
            final.rename(replaced)
        staged.rename(final)
    finally:
        if replaced.exists() and not final.exists():
            replaced.rename(final)
        shutil.rmtree(replaced, ignore_errors=True)
        shutil.rmtree(staged, ignore_errors=True)
