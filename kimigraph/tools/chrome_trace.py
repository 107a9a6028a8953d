"""``kimigraph run --trace``: what ran when, as torch.profiler sees it, for Perfetto and ``chrome://tracing``."""

import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from kimigraph.ir.errors import UsageError


@contextmanager
def traced(path: Path) -> Generator[None]:
    """Profile the block, on the CPU and on a GPU where there is one, and write the trace to ``path`` when it ends well.

    Times in it are longer than without: recording takes a few microseconds for each operator. UsageError for a path
    that cannot be written, before the block runs.
    """
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise UsageError(f"--trace {path}: give a file in a directory that is there")
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    with profile(activities=activities) as profiler:
        yield
    with tempfile.TemporaryDirectory(prefix=".kimigraph-", dir=path.absolute().parent) as scratch:
        staged = Path(scratch) / "trace.json"
        profiler.export_chrome_trace(str(staged))
        staged.replace(path)
