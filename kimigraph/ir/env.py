"""The one module that reads environment variables."""

import os
import sys
from pathlib import Path

from kimigraph.ir.sizes import parse_bytes


def cache_directory() -> Path | None:
    """``KIMIGRAPH_CACHE_DIR``, if set: where compiled programs are kept instead of the user's cache directory."""
    value = os.environ.get("KIMIGRAPH_CACHE_DIR")
    return Path(value) if value else None


def cache_limit() -> int | None:
    """``KIMIGRAPH_CACHE_LIMIT``, if set: bytes that the compile cache holds at most, such as ``500M`` or ``20G``.

    UsageError for other text.
    """
    value = os.environ.get("KIMIGRAPH_CACHE_LIMIT")
    return parse_bytes(value) if value else None


def processors() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def interpreting() -> bool:
    """Whether Triton kernels of this process run under the interpreter (``TRITON_INTERPRET=1``)."""
    return os.environ.get("TRITON_INTERPRET", "0") in ("1", "true", "True")


def enable_interpreter() -> bool:
    """Make this process run Triton kernels under the interpreter; False when it is too late (triton is imported)."""
    if not interpreting():
        if "triton" in sys.modules:
            return False
        os.environ["TRITON_INTERPRET"] = "1"
    return True


def show_tracebacks() -> bool:
    """``KIMIGRAPH_TRACEBACK=1``: the command line prints the traceback of an error, too."""
    return os.environ.get("KIMIGRAPH_TRACEBACK", "0") not in ("", "0")


def compiler_environment() -> dict[str, str]:
    """The environment for a worker that compiles kernels: this one without the interpreter."""
    return {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}


def environment_with(**changes: str) -> dict[str, str]:
    """The environment for a process that differs from this one in some variables."""
    return {**os.environ, **changes}


def interpreter_environment() -> dict[str, str]:
    """The environment for a process that runs kernels under the interpreter."""
    return {**os.environ, "TRITON_INTERPRET": "1"}


def started_ranks() -> tuple[int, int] | None:
    """Rank of this process and number of ranks as torchrun gives them; None where it did not start this process."""
    rank, ways = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    return None if rank is None or ways is None else (int(rank), int(ways))


def rank_error_file() -> Path | None:
    """The file in which torchrun's agent looks for the error of a rank; None in a process that it did not start."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    return Path(path) if path else None


def one_thread_each() -> None:
    """Have processes that are started from now on use one thread, as under torchrun, unless the user says otherwise."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
