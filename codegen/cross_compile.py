"""Kernels ahead of time: Triton source to cubins in worker processes, on a machine that needs no GPU.

A process that runs kernels under the interpreter cannot compile any, so the compiler never runs in this process.
"""

import json
import subprocess
import sys
import tempfile
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from kimigraph.codegen.kernel_writer import KernelFile, KernelSet
from kimigraph.codegen.support.cubins import ABI
from kimigraph.ir.env import compiler_environment, processors
from kimigraph.ir.errors import CompileError, UsageError
from kimigraph.ir.manifest import CubinRecord, KernelRecord

MOST_WORKERS = 8
_WORKER = Path(__file__).with_name("cross_compile_worker.py")
_UNSUPPORTED = 2


def compile_kernels(
    kernels: KernelSet, directory: Path, arch: int, notify: Callable[[str], None]
) -> tuple[tuple[KernelRecord, ...], list[str]]:
    """Build a cubin for every launch of every kernel file; returns the records with cubins, and the files written.

    Worker processes take one job at a time, the longest kernel text first, as it takes longest. Raises UsageError when
    this Triton cannot build for ``arch`` and CompileError naming the kernel that failed.
    """
    jobs = [job for file in kernels.files for job in _jobs(file, arch)]
    sizes = {file.path: len(file.module.text) for file in kernels.files}
    waiting = deque(sorted(jobs, key=lambda job: -sizes[job["source"]]))
    workers = max(1, min(len(jobs), processors(), MOST_WORKERS))
    done: list[str] = []

    def tell(path: str) -> None:
        done.append(path)
        notify(f"compiling kernels for sm_{arch}: {len(done)} of {len(jobs)}")

    notify(f"compiling {len(jobs)} kernel functions for sm_{arch}")
    # Without jobs a worker still says whether the architecture can be built for.
    with ThreadPoolExecutor(workers) as pool:
        futures = [pool.submit(_run_worker, waiting, directory, arch, tell) for _ in range(workers)]
        written = [path for future in futures for path in future.result()]
    cubins: dict[str, list[CubinRecord]] = {}
    for job in jobs:
        record = CubinRecord(job["function"], f"{job['stem']}.cubin", f"{job['stem']}.json")
        cubins.setdefault(job["source"], []).append(record)
    records = tuple(replace(record, cubins=tuple(cubins.get(record.file, ()))) for record in kernels.records())
    return records, written


def _jobs(file: KernelFile, arch: int) -> Iterator[dict[str, Any]]:
    """What to compile for a kernel file; a function launched with several sets of constants has a number from 1 on."""
    seen: Counter[str] = Counter()
    for launch in file.module.launches:
        number = seen[launch.function]
        seen[launch.function] += 1
        stem = f"kernels/{file.name}.{launch.function}" + (f".{number}" if number else "")
        yield {"source": file.path, "stem": stem, "arch": arch, "abi": ABI, **asdict(launch)}


def _run_worker(waiting: deque[dict[str, Any]], directory: Path, arch: int, tell: Callable[[str], None]) -> list[str]:
    """One worker, fed a job a line until none waits; the files that it wrote."""
    # -P: the worker's folder must not hide other packages.
    command = [sys.executable, "-P", str(_WORKER)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    paths: list[str] = []
    text: dict[str, Any] = {"text": True, "encoding": "utf-8", "env": compiler_environment()}
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8") as noise,
        subprocess.Popen(command, **pipes, stderr=noise, **text) as worker,
    ):
        assert worker.stdin and worker.stdout
        request: dict[str, Any] | None = {"directory": str(directory.resolve()), "arch": arch}
        try:
            while request is not None:
                worker.stdin.write(json.dumps(request) + "\n")
                worker.stdin.flush()
                line = worker.stdout.readline()
                if not line.startswith("["):
                    break
                for path in json.loads(line):
                    paths.append(path)
                    if path.endswith(".cubin"):
                        tell(path)
                request = _next(waiting)
        except BrokenPipeError:
            pass  # it says why at the end of its errors
        finally:
            with suppress(BrokenPipeError):
                worker.stdin.close()
        status = worker.wait()
        noise.seek(0)
        last = noise.read().strip().splitlines()[-1:]
    if status:
        waiting.clear()  # the build has failed: no other worker need begin a job
        reason = last[0] if last else f"worker ended with status {status}"
        if status == _UNSUPPORTED:
            raise UsageError(reason)
        raise CompileError(f"ahead-of-time build for sm_{arch} failed: {reason}")
    return paths


def _next(waiting: deque[dict[str, Any]]) -> dict[str, Any] | None:
    try:
        return waiting.popleft()
    except IndexError:
        return None
