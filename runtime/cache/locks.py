"""Locks between processes. They save work and guard nothing: readers take none, and a writer without one does no harm.

The kernel releases a lock when its process ends, however it ends.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

POLL_SECONDS = 0.05


@contextmanager
def exclusive(path: Path, seconds: float, waiting: Callable[[], None] = lambda: None) -> Generator[bool]:
    """Hold the lock file ``path`` for a block; the value says whether it is held.

    Waits ``seconds`` at most (calling ``waiting`` once before), and goes on without where there is no such lock: on a
    read-only disk, or a network file system that knows none.
    """
    held = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(path)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            if seconds <= 0:
                raise
            waiting()
            lock.acquire(timeout=seconds, poll_interval=POLL_SECONDS)
        held = lock
    except (Timeout, OSError, NotImplementedError):
        held = None
    try:
        yield held is not None
    finally:
        if held is not None:
            held.release()
